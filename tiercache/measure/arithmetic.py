"""Matrix products, attention and elementwise work of one device."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tiercache.measure.timing import Budget, Work, time_of
from tiercache.profile import ComputeSpeed

_ROWS, _WIDTH = 1024, 2048
_FEW = 64  # rows of a thin product, such as a chunk of the vocabulary's
_HEADS, _LENGTH, _HEAD_WIDTH = 8, 1024, 64
_FEW_QUERIES = 128  # as of one row's tail
_LAYERS = 8  # whose weights take turns, as a model's do: none is in a cache when it is next needed
_OPS = 200
_INPUTS = 4  # of elementwise work, each more than a core's own caches hold
_FRESH_BYTES = 64 << 20  # more than a C library keeps of freed memory
_GROWTH = {"cpu": 1, "cuda": 4}  # an accelerator needs larger pieces to show its speed


def finished(device: torch.device) -> Callable[[], None]:
    """Waits for what was queued on the device."""
    if device.type == "cpu":
        return lambda: None
    return lambda: torch.accelerator.synchronize(device)


def product(device: torch.device, dtype: torch.dtype) -> tuple[Work, int]:
    """One matrix product, and its floating-point operations."""
    growth = _GROWTH.get(device.type, 1)
    rows, width, wait = _rows(device), growth * _WIDTH, finished(device)
    x = torch.randn(rows, width, device=device).to(dtype)
    weight = torch.randn(width, width, device=device).to(dtype)
    layers = itertools.cycle([(x.clone(), weight.clone()) for _ in range(_LAYERS)])

    def run() -> None:
        torch.nn.functional.linear(*next(layers))
        wait()

    return run, 2 * rows * width * width


def thin_products(device: torch.device, dtype: torch.dtype) -> tuple[Work, int]:
    """A product with few rows and the two of its backward, in one of which few is what is summed over."""
    width, wait = _GROWTH.get(device.type, 1) * _WIDTH, finished(device)
    x, weight = (
        torch.randn(_FEW, width // 2, device=device).to(dtype),
        torch.randn(8 * width, width // 2).to(dtype),
    )
    grad, weight = torch.randn(_FEW, 8 * width, device=device).to(dtype), weight.to(device)

    def run() -> None:
        torch.nn.functional.linear(x, weight)
        torch.mm(grad, weight)
        torch.mm(grad.t(), x)
        wait()

    return run, 3 * 2 * _FEW * width // 2 * 8 * width


def measure_products(device: torch.device, dtype: torch.dtype, budget: Budget) -> tuple[float, float]:
    """Floating-point operations a second of products that are large every way, and the size of the smallest
    dimension at which half of that is reached.

    A product takes longer by that size over its own smallest dimension; two measured products give both figures.
    """
    (large, large_flops), (thin, thin_flops) = product(device, dtype), thin_products(device, dtype)
    large_s, thin_s = time_of(large, budget) / large_flops, time_of(thin, budget) / thin_flops
    slope = max(0.0, (thin_s - large_s) / (1 / _FEW - 1 / _rows(device)))
    least_s = large_s - slope / _rows(device)
    return 1 / least_s, slope / least_s


def _rows(device: torch.device) -> int:
    return _GROWTH.get(device.type, 1) * _ROWS


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
    flops_per_s, half_dim = measure_products(device, dtype, budget)
    growth = _GROWTH.get(device.type, 1)
    length = growth * _LENGTH
    forward_s, backward_s = _attention_s_per_flop(device, dtype, budget, kernels, length)
    few = sum(_attention_s_per_flop(device, dtype, budget, kernels, _FEW_QUERIES))
    # seconds over those of the long call: a part that is always there, and one that queries share
    shared = max(0.0, few / (forward_s + backward_s) - 1) / (1 / _FEW_QUERIES - 1 / length)
    least = max(0.1, 1 - shared / length)
    return ComputeSpeed(
        matmul_flops_per_s=flops_per_s,
        matmul_half_dim=half_dim,
        attention_flops_per_s=1 / (least * forward_s),
        attention_backward_flops_per_s=1 / (least * backward_s),
        attention_half_queries=shared / least,
    )


def _attention_s_per_flop(
    device: torch.device, dtype: torch.dtype, budget: Budget, kernels: AttentionKernels, queries: int
) -> tuple[float, float]:
    """Seconds a floating-point operation, forward and backward, of so many queries over a page."""
    growth, wait = _GROWTH.get(device.type, 1), finished(device)
    heads, length = growth * _HEADS, growth * _LENGTH
    q, grad = (torch.randn(1, heads, queries, _HEAD_WIDTH, device=device).to(dtype) for _ in range(2))
    k, v = (torch.randn(1, heads, length, _HEAD_WIDTH, device=device).to(dtype) for _ in range(2))
    flops = 4 * heads * queries * length * _HEAD_WIDTH
    kept = kernels.forward(q, k, v)

    def forward() -> None:
        kernels.forward(q, k, v)
        wait()

    def backward() -> None:
        kernels.backward(grad, q, k, v, kept)
        wait()

    return time_of(forward, budget) / flops, time_of(backward, budget) / (2.5 * flops)


def measure_stream(device: torch.device, budget: Budget) -> float:
    """Bytes a second that elementwise work on a layer's activations reads and writes.

    Each result is a new tensor, as in a forward and its backward, in memory that the process has.
    """
    wait, growth = finished(device), _GROWTH.get(device.type, 1)
    inputs = [
        torch.randn(2 * _rows(device), growth * 3 * _WIDTH // 4, device=device).bfloat16()
        for _ in range(_INPUTS)
    ]

    def run() -> None:
        for x in inputs:
            wide = x.float()
            torch.nn.functional.silu((wide * wide).to(x.dtype)).add_(x)
        wait()

    # of each operator in turn what it reads and writes of a number
    num_bytes = (2 + 4) + (4 + 4 + 4) + (4 + 2) + (2 + 2) + (2 + 2 + 2)
    return _INPUTS * num_bytes * inputs[0].numel() / time_of(run, budget)


def measure_fresh(device: torch.device, budget: Budget) -> float:
    """Seconds that a byte of new memory costs beyond being written; an accelerator's allocator keeps what it had."""
    if device.type != "cpu":
        return 0.0
    kept = torch.empty(_FRESH_BYTES, dtype=torch.uint8)

    def anew() -> None:
        torch.empty(_FRESH_BYTES, dtype=torch.uint8).fill_(1)

    def again() -> None:
        kept.fill_(1)

    return max(0.0, time_of(anew, budget) - time_of(again, budget)) / _FRESH_BYTES


def measure_op(device: torch.device, budget: Budget) -> float:
    """Seconds of an operator on next to nothing."""
    wait = finished(device)
    x = torch.zeros(4, device=device)

    def run() -> None:
        for _ in range(_OPS):
            torch.add(x, 1.0)
        wait()

    return time_of(run, budget) / _OPS
