"""Attention of one block on the processor's own bf16 instructions, where it has them.

Torch's operator for the host multiplies at a third of what its matrix products reach on AVX512-BF16, and its backward
at a third of what AMX allows; attention is half of the work on a long prompt. These kernels keep scores in fp32 as it
does, and give outputs and gradients in fp32.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import torch

from tiercache.runtime import _attention

if TYPE_CHECKING:
    from tiercache.runtime.kernels import Block, Flow

_PANEL = 64  # widths are multiples of it


@cache
def _available() -> bool:
    return _attention.available()


@cache
def _amx() -> bool:
    return _attention.amx_available()


def serves(q: torch.Tensor, value_width: int, block: Block) -> bool:
    """Whether the kernels take queries [B, H, n, D] and this block: bf16 in main memory, no mask or soft cap.

    Tensors of a class of their own may have no memory to address.
    """
    return (
        type(q) is torch.Tensor
        and q.dtype == torch.bfloat16
        and q.device.type == "cpu"
        and q.shape[0] == 1
        and block.bias is None
        and block.softcap is None
        and q.shape[-1] % _PANEL == 0
        and value_width % _PANEL == 0
        and _available()
    )


def _address(x: torch.Tensor) -> tuple[int, int, int]:
    """Of [1, heads, rows, width]: data, and strides of heads and rows."""
    return x.data_ptr(), x.stride(1), x.stride(2)


def _pairs(x: torch.Tensor) -> torch.Tensor:
    """The tensor with rows in one piece that pairs of numbers can be read from."""
    even = x.stride(2) % 2 == 0 or x.shape[2] == 1
    return x if x.stride(3) == 1 and even else x.contiguous()


def _sizes(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[int, int, int, int, int, int]:
    return q.shape[1], k.shape[1], q.shape[2], k.shape[2], q.shape[3], v.shape[3]


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, block: Block
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output [1, Hq, Lq, Dv] and log-sum-exp [1, Hq, Lq] of one block, both fp32; shapes as in `block_forward`."""
    q, k, v = _pairs(q), _pairs(k), _pairs(v)
    out = torch.empty(*q.shape[:3], v.shape[-1])
    lse = torch.empty(*q.shape[:3], 1)
    _attention.forward(
        _sizes(q, k, v), block.causal, block.scale, torch.get_num_threads(), _amx(),
        _address(q), _address(k), _address(v), _address(out), _address(lse),
    )  # fmt: skip
    return out, lse[..., 0]


def backward(flow: Flow, block: Block) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """dQ, dK and dV of one block in fp32."""
    q, k, v = _pairs(flow.q), _pairs(flow.k), _pairs(flow.v)
    grad_out, out = _pairs(flow.grad_out.to(q.dtype)), _pairs(flow.out.to(q.dtype))
    lse = flow.lse.contiguous()[..., None]
    dq, dk, dv = (torch.empty(x.shape) for x in (q, k, v))
    _attention.backward(
        _sizes(q, k, v), block.causal, block.scale, torch.get_num_threads(), _amx(),
        _address(grad_out), _address(q), _address(k), _address(v), _address(out), _address(lse),
        _address(dq), _address(dk), _address(dv),
    )  # fmt: skip
    return dq, dk, dv
