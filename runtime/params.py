"""Trainable parameters during a step: stand-ins that share their storage, and the sums of their gradients.

The visits of a step run backward many times, but the caller must see one ordinary gradient per parameter:
hooks, GradScaler and distributed wrappers fire once. So the model runs on stand-ins, detached aliases of its
parameters that gather gradients on their own, and the sum is handed over once.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from tiercache.errors import ConfigError, ParameterChangedError
from tiercache.runtime.kernels import accumulator_dtype

_CHUNK = 1 << 20  # elements: torch widens a mixed addend as a whole, a second copy of the largest weight


def _add(total: torch.Tensor, grad: torch.Tensor) -> None:
    """Adds a gradient of a narrower dtype in place, a chunk at a time where that spares memory."""
    plain = type(total) is torch.Tensor  # others may have none
    if total.dtype == grad.dtype or not (plain and total.is_contiguous() and grad.is_contiguous()):
        total += grad
        return
    for part, addend in zip(total.view(-1).split(_CHUNK), grad.view(-1).split(_CHUNK), strict=True):
        part += addend


class ParameterSums:
    """Stand-ins for a model's trainable parameters.

    Args:
        model: whose parameters are stood in for. Tied parameters get one stand-in.
        sum_in_fp32: keep sums of bf16 and fp16 gradients in fp32 and round once at the end (4 bytes a
            parameter during a step); otherwise they add up in the parameter's own dtype.
    """

    def __init__(self, model: nn.Module, *, sum_in_fp32: bool = True) -> None:
        self.sum_in_fp32 = sum_in_fp32
        self.names: list[str] = []
        self.parameters: list[nn.Parameter] = []
        self._stand_ins: list[torch.Tensor] = []
        self._sums: list[torch.Tensor | None] = []
        self._places: list[tuple[nn.Module, str, int]] = []
        index: dict[int, int] = {}
        for prefix, module in model.named_modules():
            for name, parameter in module._parameters.items():  # noqa: SLF001 - the table that forward reads
                if parameter is None or not parameter.requires_grad:
                    continue
                if id(parameter) not in index:
                    index[id(parameter)] = len(self.parameters)
                    self.names.append(f"{prefix}.{name}" if prefix else name)
                    self.parameters.append(parameter)
                    self._stand_ins.append(self._stand_in(len(self._sums), parameter))
                    self._sums.append(None)
                self._places.append((module, name, index[id(parameter)]))

    def require_some(self) -> None:
        """Raises ConfigError when no parameter is trainable."""
        if not self.parameters:
            raise ConfigError(
                "model has no trainable parameters",
                got=0,
                limit="at least 1",
                remedy="set requires_grad on some, or score it through tiercache.runtime.reference.Reference",
            )

    def _stand_in(self, index: int, parameter: nn.Parameter) -> torch.Tensor:
        stand_in = parameter.detach().requires_grad_()

        def gather(tensor: torch.Tensor) -> None:
            grad, tensor.grad = tensor.grad, None
            assert grad is not None
            total = self._sums[index]
            if total is None:
                self._sums[index] = grad.to(self._sum_dtype(grad.dtype), copy=False)
            else:
                _add(total, grad)

        stand_in.register_post_accumulate_grad_hook(gather)
        return stand_in

    def _sum_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return accumulator_dtype(dtype) if self.sum_in_fp32 else dtype

    def matches(self, model: nn.Module) -> bool:
        """Whether the model still has the parameters, storages and flags seen at construction."""
        now = {id(p) for p in model.parameters() if p.requires_grad}
        return now == {id(p) for p in self.parameters} and all(
            p.data_ptr() == s.data_ptr() for p, s in zip(self.parameters, self._stand_ins, strict=True)
        )

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Runs the model on its stand-ins; the parameters come back even after an exception."""
        for module, name, index in self._places:
            module._parameters[name] = self._stand_ins[index]  # type: ignore[assignment]  # noqa: SLF001
        try:
            yield
        finally:
            for module, name, index in self._places:
                module._parameters[name] = self.parameters[index]  # noqa: SLF001

    def versions(self) -> tuple[int, ...]:
        """Autograd's count of in-place changes of each parameter."""
        return tuple(p._version for p in self.parameters)  # noqa: SLF001

    def check_versions(self, before: tuple[int, ...]) -> None:
        """Raises ParameterChangedError, naming the parameter, when one was written since `before`."""
        for name, old, new in zip(self.names, before, self.versions(), strict=True):
            if old != new:
                raise ParameterChangedError(
                    f"parameter {name} changed between capture and pop",
                    got=f"version {new}",
                    limit=f"version {old}",
                    remedy="call optimizer.step() only after backward has finished",
                )

    def take(self) -> list[torch.Tensor | None]:
        """The sums, rounded once into each parameter's dtype, None where no gradient came; clears them.

        Both are there for one parameter at a time. The largest, usually the vocabulary's, comes last, when all others
        have been let go: taken first it would be the peak of a step.
        """
        sums: list[torch.Tensor | None] = [None] * len(self.parameters)
        for i in sorted(range(len(sums)), key=lambda i: self.parameters[i].nbytes):
            total, self._sums[i] = self._sums[i], None
            if total is not None:
                sums[i] = total.to(self.parameters[i].dtype)
        return sums

    def clear(self) -> None:
        """Forgets every sum."""
        for i, stand_in in enumerate(self._stand_ins):
            self._sums[i] = stand_in.grad = None

    @property
    def num_bytes(self) -> int:
        """Bytes of the sums held now."""
        return sum(s.numel() * s.element_size() for s in self._sums if s is not None)
