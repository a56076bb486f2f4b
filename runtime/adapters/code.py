"""What a module's forward asks of the cache it is given, read from its code."""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn


def written_forward(module: nn.Module) -> Any:
    """The function that a module's class defines as its forward, out of its decorators."""
    return inspect.unwrap(type(module).forward)


def takes_cache(module: nn.Module, names: set[str]) -> bool:
    """Whether a module's forward has an argument `cache` and uses one of these names."""
    code = getattr(written_forward(module), "__code__", None)
    return code is not None and "cache" in code.co_varnames and bool(names & set(code.co_names))
