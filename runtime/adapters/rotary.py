"""Rotary tables that follow the longest position of a call, held still for a step.

The types `dynamic` and `longrope` choose frequencies from the longest position that a call sees. In a batch
of whole rows that is the longest row; in a tree every visit sees another. So each call is shown the step's
longest position beside its own, and the frequencies are those of a batch padded to the longest row.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

_MOVING = ("dynamic", "longrope")


def moving_tables(model: nn.Module) -> list[nn.Module]:
    """Modules whose frequencies follow the call."""
    return [module for module in model.modules() if _rope_types(module) & set(_MOVING)]


def _rope_types(module: nn.Module) -> set[str]:
    kind = getattr(module, "rope_type", None)
    if isinstance(kind, dict):
        return {str(each) for each in kind.values()}
    return {kind} if isinstance(kind, str) else set()


@contextmanager
def fixed_frequencies(model: nn.Module, longest_row: int) -> Iterator[None]:
    """Gives every rotary table of `model` the frequencies of a row of `longest_row` tokens."""

    def show_longest(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if "position_ids" in kwargs:
            return args, {**kwargs, "position_ids": _append(kwargs["position_ids"], longest_row - 1)}
        return (args[0], _append(args[1], longest_row - 1), *args[2:]), kwargs

    def drop_longest(_: nn.Module, args: Any, output: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        del args
        return tuple(table[:, :-1] for table in output)

    handles = []
    for module in moving_tables(model):
        handles.append(module.register_forward_pre_hook(show_longest, with_kwargs=True))
        handles.append(module.register_forward_hook(drop_longest))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _append(position_ids: torch.Tensor, position: int) -> torch.Tensor:
    return torch.nn.functional.pad(position_ids, (0, 1), value=position)
