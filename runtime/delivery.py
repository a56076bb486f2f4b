"""How the gradients of a step reach autograd's engine: as one ordinary gradient for each parameter.

The parameters are inputs of these functions, so hooks, scalers and `torch.autograd.grad` see what they would
see after an ordinary backward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable

Gradients = list[torch.Tensor | None]


def differentiable(
    gradients: Callable[[torch.Tensor, torch.Tensor], Gradients],
    values: torch.Tensor,
    auxiliary: torch.Tensor,
    parameters: Sequence[torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Values and an auxiliary loss that were computed without a graph, as functions of the parameters.

    Args:
        gradients: from the gradients of both to one of each parameter; called by backward.
        values: of any shape.
        auxiliary: a scalar.
        parameters: that they depend on.
    """
    values, auxiliary = _Differentiable.apply(gradients, values, auxiliary, *parameters)  # type: ignore[no-untyped-call]
    return values, auxiliary


class _Differentiable(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        gradients: Callable[[torch.Tensor, torch.Tensor], Gradients],
        values: torch.Tensor,
        auxiliary: torch.Tensor,
        *parameters: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.gradients = gradients
        return values.clone() if not parameters else values, auxiliary

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad: torch.Tensor, grad_auxiliary: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        return (None, None, None, *ctx.gradients(grad, grad_auxiliary))


def deliver(parameters: list[nn.Parameter], gradients: Gradients) -> None:
    """Adds gradients to the parameters' `.grad` through the engine, so that hooks fire once."""
    if all(g is None for g in gradients):
        return
    with torch.enable_grad():
        handle: torch.Tensor = _Delivery.apply(gradients, *parameters)  # type: ignore[no-untyped-call]
    handle.backward()


class _Delivery(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gradients: Gradients, *parameters: torch.Tensor) -> torch.Tensor:
        ctx.gradients = gradients
        return parameters[0].new_zeros(())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        del grad
        return (None, *ctx.gradients)
