"""Standing in for the forward of modules, for a while."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

Forward = Callable[..., Any]


@contextmanager
def replaced_forwards(forwards: Iterable[tuple[nn.Module, Forward]]) -> Iterator[None]:
    """Gives each module the forward beside it; what hid the class's own (a device map's hook) comes back after."""
    pairs = list(forwards)
    hidden = [module.__dict__.get("forward") for module, _ in pairs]
    for module, forward in pairs:
        module.forward = forward
    try:
        yield
    finally:
        for (module, _), before in zip(pairs, hidden, strict=True):
            if before is None:
                del module.forward
            else:
                module.forward = before
