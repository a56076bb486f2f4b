"""The caller's loss of one row: called on its log-probabilities, checked, and turned into dL/dlogp."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from tiercache.errors import LossError
from tiercache.runtime.rows import TokenRow

LossFn = Callable[[torch.Tensor, Any], object]


def row_loss(
    loss_fn: LossFn, logps: torch.Tensor, row: Any, checked: TokenRow, index: int
) -> tuple[float, torch.Tensor]:
    """Loss of a row and its gradient.

    Args:
        loss_fn: the caller's.
        logps: [S] log-probabilities of the row's scored positions, detached, on the model's device.
        row: the caller's own row, handed to `loss_fn`.
        checked: the same row, checked.
        index: of the row, for messages.

    Returns:
        The loss, and dL/dlogp [S] on the host.

    Raises:
        LossError: loss_fn returned something that is not a finite scalar tensor.
    """
    leaf = logps.detach().requires_grad_()
    with torch.enable_grad():
        positions = torch.from_numpy(checked.scored).to(leaf.device)
        full = leaf.new_zeros(len(checked.tokens)).index_put((positions,), leaf)
        loss = loss_fn(full, row)
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        got = f"shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
        raise LossError(
            f"loss_fn of row {index}", got=got, limit="a scalar tensor", remedy="sum or average it"
        )
    value = float(loss.detach())
    if not math.isfinite(value):
        raise LossError(
            f"loss_fn of row {index}",
            got=value,
            limit="finite",
            remedy="check advantages and log-prob ratios",
        )
    if not loss.requires_grad:  # a row that was masked out altogether
        return value, torch.zeros(len(leaf), dtype=leaf.dtype)
    found: tuple[torch.Tensor | None, ...] = torch.autograd.grad(loss.reshape(()), leaf, allow_unused=True)
    grad = found[0]
    if grad is None:
        return value, torch.zeros(len(leaf), dtype=leaf.dtype)
    if not bool(torch.isfinite(grad).all()):
        raise LossError(f"gradient of loss_fn of row {index}", got="NaN or infinity", limit="finite")
    return value, grad.cpu()
