"""Matrix products, attention and elementwise work of one device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tiercache.measure.timing import Budget, Work, time_of
from tiercache.profile import ComputeSpeed

_ROWS, _WIDTH = 1024, 2048
_HEADS, _LENGTH, _HEAD_WIDTH = 8, 1024, 64
_STREAM_BYTES = 64 << 20
_OPS = 200
_GROWTH = {"cpu": 1, "cuda": 4}  # an accelerator needs larger pieces to show its speed


def finished(device: torch.device) -> Callable[[], None]:
    """Waits for what was queued on the device."""
    if device.type == "cpu":
        return lambda: None
    return lambda: torch.accelerator.synchronize(device)


def product(device: torch.device, dtype: torch.dtype) -> tuple[Work, int]:
    """One matrix product, and its floating-point operations."""
    growth = _GROWTH.get(device.type, 1)
    rows, width, wait = growth * _ROWS, growth * _WIDTH, finished(device)
    x = torch.randn(rows, width, device=device).to(dtype)
    weight = torch.randn(width, width, device=device).to(dtype)

    def run() -> None:
        torch.nn.functional.linear(x, weight)
        wait()

    return run, 2 * rows * width * width


@dataclass(frozen=True, slots=True)
class AttentionKernels:
    """The attention whose speed counts.

    Attributes:
        forward: of q, k, v [1, H, L, D]; what backward needs of it beside them.
        backward: of grad, q, k, v and that.
    """

    forward: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Any]
    backward: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, Any], Any]


def measure_compute(
    device: torch.device, dtype: torch.dtype, budget: Budget, kernels: AttentionKernels
) -> ComputeSpeed:
    """Speeds of a dtype."""
    run, flops = product(device, dtype)
    growth = _GROWTH.get(device.type, 1)
    shape = (1, growth * _HEADS, growth * _LENGTH, _HEAD_WIDTH)
    q, k, v, grad = (torch.randn(shape, device=device).to(dtype) for _ in range(4))
    attention_flops = 4 * shape[1] * shape[2] ** 2 * shape[3]
    wait = finished(device)
    kept = kernels.forward(q, k, v)

    def forward() -> None:
        kernels.forward(q, k, v)
        wait()

    def backward() -> None:
        kernels.backward(grad, q, k, v, kept)
        wait()

    return ComputeSpeed(
        matmul_flops_per_s=flops / time_of(run, budget),
        attention_flops_per_s=attention_flops / time_of(forward, budget),
        attention_backward_flops_per_s=2.5 * attention_flops / time_of(backward, budget),
    )


def measure_stream(device: torch.device, budget: Budget) -> float:
    """Bytes a second that elementwise work reads and writes."""
    wait = finished(device)
    x = torch.zeros(_GROWTH.get(device.type, 1) * _STREAM_BYTES // 4, device=device)
    out = torch.empty_like(x)

    def run() -> None:
        torch.add(x, 1.0, out=out)
        wait()

    return 2 * x.nbytes / time_of(run, budget)


def measure_op(device: torch.device, budget: Budget) -> float:
    """Seconds of an operator on next to nothing."""
    wait = finished(device)
    x = torch.zeros(4, device=device)

    def run() -> None:
        for _ in range(_OPS):
            torch.add(x, 1.0)
        wait()

    return time_of(run, budget) / _OPS
