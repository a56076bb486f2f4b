"""Giving freed memory back to the operating system."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch


@cache
def _trim_function() -> Any:
    """The C library's malloc_trim, or None where the C library has none."""
    try:
        return ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError):
        return None


_watching: list[Callable[[], None]] = []


@contextmanager
def watching_releases(told: Callable[[], None]) -> Iterator[None]:
    """Calls `told` whenever memory is given back inside the block: what is allocated next is new to the process."""
    _watching.append(told)
    try:
        yield
    finally:
        _watching.remove(told)


def release_free_memory(device: torch.device) -> None:
    """Returns what the host's allocator holds of freed tensors, where `device` is the host.

    glibc keeps freed blocks of up to 32 MiB for reuse. Visits differ in their shapes, so what one leaves seldom fits
    the next, and the resident peak of a step would be the sum of both. On other C libraries this does nothing.
    """
    trim = _trim_function()
    if device.type == "cpu" and trim is not None:
        trim(0)
    for told in _watching:
        told()
