"""Whole parameters for a step, whatever holds them between steps: the model itself, DDP or FSDP2."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Partial

_FSDP = "torch.distributed.fsdp"


class Gathered:
    """A model's parameters, whole on every rank while `installed`.

    Under FSDP2 every rank gathers each parameter once, in one order, and the module's own gathering is put
    aside: ranks make different numbers of visits, so a gather in a visit would wait for ever. Elsewhere this
    does nothing. Construction is a collective call.

    Args:
        model: not wrapped by DDP.

    Attributes:
        owned: the model's own trainable parameters, where gradients belong.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._whole: dict[int, nn.Parameter] = {}
        self.owned: list[nn.Parameter] = []
        seen = set()
        for parameter in model.parameters():
            if isinstance(parameter, DTensor):
                whole = cast(DTensor, parameter.detach()).full_tensor()
                self._whole[id(parameter)] = nn.Parameter(whole, requires_grad=parameter.requires_grad)
            if parameter.requires_grad and id(parameter) not in seen:
                self.owned.append(parameter)
            seen.add(id(parameter))

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Runs the model on whole parameters, without FSDP2's hooks."""
        if not self._whole:
            yield
            return
        places = [
            (module, name, parameter)
            for module in self.model.modules()
            for name, parameter in module._parameters.items()  # noqa: SLF001 - the table that forward reads
            if id(parameter) in self._whole
        ]
        hooks = [_without_fsdp(module) for module in self.model.modules()]
        for module, name, parameter in places:
            module._parameters[name] = self._whole[id(parameter)]  # noqa: SLF001
        try:
            yield
        finally:
            for module, name, parameter in places:
                module._parameters[name] = parameter  # noqa: SLF001
            for module, before, after in hooks:
                module._forward_pre_hooks, module._forward_hooks = before, after  # noqa: SLF001

    def reduced(self, gradients: list[torch.Tensor | None], group: Any) -> list[torch.Tensor | None]:
        """Sums over ranks, as the owned parameters hold them. A collective call: as many gradients on each rank.

        A gradient that no rank has stays None.
        """
        present = torch.tensor([g is not None for g in gradients], dtype=torch.int32)
        present = present.to(self.owned[0].device)
        torch.distributed.all_reduce(present, group=group)
        return [
            self._reduce(owned, gradient, group) if there else None
            for owned, gradient, there in zip(self.owned, gradients, present.tolist(), strict=True)
        ]

    def _reduce(self, owned: nn.Parameter, gradient: torch.Tensor | None, group: Any) -> torch.Tensor:
        if isinstance(owned, DTensor):
            whole = self._whole[id(owned)]
            mine = torch.zeros_like(whole) if gradient is None else gradient
            mesh = owned.device_mesh
            partial = DTensor.from_local(mine, mesh, [Partial()] * mesh.ndim, run_check=False)
            return partial.redistribute(mesh, owned.placements)
        total = torch.zeros_like(owned) if gradient is None else gradient.detach().clone()
        torch.distributed.all_reduce(total, group=group)
        return total


def _without_fsdp(module: nn.Module) -> tuple[nn.Module, Any, Any]:
    before, after = module._forward_pre_hooks, module._forward_hooks  # noqa: SLF001

    def others(hooks: Any) -> Any:
        kept = [(i, h) for i, h in hooks.items() if not str(getattr(h, "__module__", "")).startswith(_FSDP)]
        return OrderedDict(kept)

    module._forward_pre_hooks, module._forward_hooks = others(before), others(after)  # noqa: SLF001
    return module, before, after
