"""Giving freed memory back to the operating system."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any


@cache
def _trim_function() -> Any:
    """glibc's malloc_trim, or None where the C library has none."""
    try:
        return ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError):
        return None


def release_free_memory() -> None:
    """Returns what the allocator holds of freed tensors.

    glibc keeps freed blocks of up to 32 MiB for reuse. Visits differ in their shapes, so what one leaves seldom fits
    the next, and the resident peak of a step would be the sum of both. On other C libraries this does nothing.
    """
    trim = _trim_function()
    if trim is not None:
        trim(0)
