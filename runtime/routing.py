"""Debug check of experts: a recomputed node must send its tokens to the experts that its capture chose.

A module chooses where tokens go by integer tensors: a router returns them, or a block of experts is given
them. Those of a node's capture are kept, and compared with those of its pop.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from tiercache.errors import ParameterChangedError

Choices = dict[str, list[torch.Tensor]]


@contextmanager
def recorded_choices(model: nn.Module, layers: list[nn.Module], *, enabled: bool) -> Iterator[Choices]:
    """Fills a table, by module name, with the integer tensors that modules below `layers` give and are given."""
    choices: Choices = {}
    handles = []
    names = {id(module): name for name, module in model.named_modules()}
    inner = [m for layer in layers for m in layer.modules() if m is not layer] if enabled else []
    for module in inner:

        def keep(_: nn.Module, args: Any, output: Any, name: str = names[id(module)]) -> None:
            found = _integers(args) + _integers(output)
            if found:
                choices.setdefault(name, []).extend(found)

        handles.append(module.register_forward_hook(keep))
    try:
        yield choices
    finally:
        for handle in handles:
            handle.remove()


def _integers(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value.detach().clone()] if value.dtype in (torch.int64, torch.int32) else []
    return [t for item in value for t in _integers(item)] if isinstance(value, list | tuple) else []


def check_choices(captured: Choices, recomputed: Choices) -> None:
    """Raises ParameterChangedError, naming the module, where a recomputation chose otherwise than the capture."""
    for name, again in recomputed.items():
        before = captured.get(name, [])
        for ours, theirs in zip(before, again, strict=False):
            if not torch.equal(ours, theirs):
                differ = int((ours != theirs).sum()) if ours.shape == theirs.shape else ours.numel()
                raise ParameterChangedError(
                    f"pop of {name}: the experts it chose differ from those of the capture",
                    got=f"{differ} of {ours.numel()} choices",
                    limit="none",
                    remedy="keep weights, adapters and module modes unchanged between capture and pop",
                )
