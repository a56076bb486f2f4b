"""The runtime's own attention, for those who measure what a machine can do."""

from __future__ import annotations

from typing import Any

import torch

from tiercache.measure.arithmetic import AttentionKernels
from tiercache.runtime.kernels import Block, block_backward, block_forward


def attention_kernels() -> AttentionKernels:
    """One page's product: every query sees every key."""

    def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        return block_forward(q, k, v, Block(q.shape[-1] ** -0.5))

    def backward(grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kept: Any) -> Any:
        out, lse = kept
        return block_backward(grad, q, k, v, out.to(q.dtype), lse, Block(q.shape[-1] ** -0.5))

    return AttentionKernels(forward, backward)
