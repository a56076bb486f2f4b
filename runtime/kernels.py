"""Attention of one block of queries against one block of keys, forward with log-sum-exp and backward from it.

Every block is exact given the log-sum-exp and output of the whole softmax, so blocks add up to attention over
any number of pages. Our own kernels serve bf16 on processors with its instructions, torch's operators serve where
they can, and the plain form serves everything else.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.nn import functional

from tiercache.runtime import native_attention

_CPU_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
_CUDA_DTYPES = (torch.bfloat16, torch.float16)
MASKED = -1e30  # finite, so that a query that sees nothing of a page gets weight 0 and no NaN
_PLAIN_ROWS = 512  # queries at a time in the plain form: bounds its scores


@dataclass(frozen=True, slots=True)
class Block:
    """How the queries of a block see its keys.

    Attributes:
        scale: factor on the scores.
        causal: query i sees keys 0..i; as many queries as keys.
        bias: [Lq, Lk], 0 where seen and MASKED elsewhere, or None.
        softcap: scores become softcap * tanh(scores / softcap), or None.
    """

    scale: float
    causal: bool = False
    bias: torch.Tensor | None = None
    softcap: float | None = None


class Flow(NamedTuple):
    """What the backward of a block starts from; shapes as in `block_forward`.

    Attributes:
        grad_out: of the output.
        q, k, v: that the block was given.
        out, lse: of the whole softmax.
    """

    grad_out: torch.Tensor
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor


def _aten(name: str) -> Any:
    """One of torch's own attention operators; they have no public name."""
    return getattr(torch.ops.aten, name)


def accumulator_dtype(dtype: torch.dtype) -> torch.dtype:
    """fp64 for fp64, else fp32: in what partial outputs are merged and sums are kept."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _on_cpu_operator(q: torch.Tensor, block: Block) -> bool:
    return q.device.type == "cpu" and q.dtype in _CPU_DTYPES and block.softcap is None


def _on_cuda_operator(q: torch.Tensor, block: Block, value_dim: int) -> bool:
    return (
        q.device.type == "cuda"
        and q.dtype in _CUDA_DTYPES
        and block.softcap is None
        and block.bias is None
        and max(q.shape[-1], value_dim) <= 256
    )


def _pad(x: torch.Tensor, width: int) -> torch.Tensor:
    return x if x.shape[-1] == width else functional.pad(x, (0, width - x.shape[-1]))


def _expand_heads(x: torch.Tensor, heads: int) -> torch.Tensor:
    """[B, Hkv, L, D] -> [B, heads, L, D] without a copy where strides allow."""
    b, kv, length, d = x.shape
    return (
        x if kv == heads else x[:, :, None].expand(b, kv, heads // kv, length, d).reshape(b, heads, length, d)
    )


def block_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, block: Block
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and log-sum-exp of one block.

    Args:
        q: [B, Hq, Lq, Dk].
        k: [B, Hkv, Lk, Dk]; Hq is a multiple of Hkv.
        v: [B, Hkv, Lk, Dv].
        block: mask, scale and soft cap.

    Returns:
        out [B, Hq, Lq, Dv] in q's dtype or fp32, lse [B, Hq, Lq] in fp32 (fp64 for fp64).
    """
    if native_attention.serves(q, v.shape[-1], block):
        return native_attention.forward(q, k, v, block)
    width, value_dim = max(q.shape[-1], v.shape[-1]), v.shape[-1]
    if _on_cpu_operator(q, block):
        out, lse = _aten("_scaled_dot_product_flash_attention_for_cpu")(
            _pad(q, width),
            _pad(k, width),
            _pad(v, width),
            0.0,
            block.causal,
            attn_mask=_bias4(q, block),
            scale=block.scale,
        )
        return out[..., :value_dim], lse
    if _on_cuda_operator(q, block, value_dim):
        width = -(-width // 8) * 8
        heads = q.shape[1]
        result = _aten("_scaled_dot_product_flash_attention")(
            _pad(q, width), _pad(_expand_heads(k, heads), width), _pad(_expand_heads(v, heads), width),
            0.0, block.causal, return_debug_mask=False, scale=block.scale,
        )  # fmt: skip
        return result[0][..., :value_dim], result[1]
    return _plain_forward(q, k, v, block)


def block_backward(
    grad_out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    block: Block,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """dQ, dK and dV of one block, exact when `out` and `lse` are those of the whole softmax.

    Shapes as in `block_forward`; the gradients have the shapes of q, k and v, and their dtypes or fp32.
    """
    if native_attention.serves(q, v.shape[-1], block):
        return native_attention.backward(Flow(grad_out, q, k, v, out, lse), block)
    width, value_dim, key_dim = max(q.shape[-1], v.shape[-1]), v.shape[-1], q.shape[-1]
    if _on_cpu_operator(q, block):
        if _cores_idle(q.shape[1], k.shape[1]):
            return _sum_groups(block_backward(
                grad_out, q, _expand_heads(k, q.shape[1]), _expand_heads(v, q.shape[1]), out, lse, block
            ), k.shape[1])  # fmt: skip
        dq, dk, dv = _aten("_scaled_dot_product_flash_attention_for_cpu_backward")(
            _pad(grad_out, width), _pad(q, width), _pad(k, width), _pad(v, width), _pad(out, width), lse,
            0.0, block.causal, attn_mask=_bias4(q, block), scale=block.scale,
        )  # fmt: skip
        return dq[..., :key_dim], dk[..., :key_dim], dv[..., :value_dim]
    if _on_cuda_operator(q, block, value_dim):
        return _cuda_backward(Flow(grad_out, q, k, v, out, lse), block)
    return _plain_backward(Flow(grad_out, q, k, v, out, lse), block)


def _cores_idle(heads: int, kv_heads: int) -> bool:
    """Whether the backward, which shares its work out by key-value heads, does better with one for each query head."""
    threads = torch.get_num_threads()
    return kv_heads < heads and -(-kv_heads // threads) * (heads // kv_heads) > -(-heads // threads)


def _sum_groups(
    gradients: tuple[torch.Tensor, torch.Tensor, torch.Tensor], kv_heads: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients with dK and dV of query heads [B, Hq, Lk, D] summed over those that share a key-value head."""
    dq, dk, dv = gradients
    return dq, *(x.unflatten(1, (kv_heads, -1)).sum(2, dtype=accumulator_dtype(x.dtype)) for x in (dk, dv))


def _bias4(q: torch.Tensor, block: Block) -> torch.Tensor | None:
    return None if block.bias is None else block.bias.to(q.dtype)[None, None]


def _cuda_backward(flow: Flow, block: Block) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    grad_out, q, k, v, out, lse = flow
    key_dim, value_dim, heads, kv = q.shape[-1], v.shape[-1], q.shape[1], k.shape[1]
    width = -(-max(key_dim, value_dim) // 8) * 8
    # without dropout the random state is never read, so an empty one serves
    seed = torch.zeros(2, dtype=torch.uint64, device=q.device)
    unused = torch.zeros((), dtype=torch.uint64, device=q.device)
    dq, dk, dv = _aten("_scaled_dot_product_flash_attention_backward")(
        _pad(grad_out, width).contiguous(), _pad(q, width), _pad(_expand_heads(k, heads), width),
        _pad(_expand_heads(v, heads), width), _pad(out, width).contiguous(), lse.contiguous(),
        None, None, q.shape[2], k.shape[2], 0.0, block.causal, seed, unused, scale=block.scale,
    )  # fmt: skip
    if kv != heads:
        b, _, length, _ = dk.shape
        dk = dk.view(b, kv, heads // kv, length, width).sum(2)
        dv = dv.view(b, kv, heads // kv, length, width).sum(2)
    return dq[..., :key_dim], dk[..., :key_dim], dv[..., :value_dim]


def _scores(
    q: torch.Tensor, k: torch.Tensor, block: Block, first: int
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Masked scores [B, Hkv, g, n, Lk] of queries `first`.. and tanh of the soft cap, for the derivative."""
    scores = torch.matmul(q, k[:, :, None].transpose(-1, -2)) * block.scale
    bent = None
    if block.softcap is not None:
        bent = torch.tanh(scores / block.softcap)
        scores = bent * block.softcap
    rows, keys = scores.shape[-2], scores.shape[-1]
    if block.causal:
        hidden = torch.ones(rows, keys, dtype=torch.bool, device=q.device).triu(first + 1)
        scores = scores.masked_fill(hidden, MASKED)
    if block.bias is not None:
        scores = scores + block.bias[first : first + rows].to(scores.dtype)
    return scores, bent


def _grouped(x: torch.Tensor, kv: int, dtype: torch.dtype) -> torch.Tensor:
    b, heads, length, d = x.shape
    return x.to(dtype).reshape(b, kv, heads // kv, length, d)


def _plain_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, block: Block
) -> tuple[torch.Tensor, torch.Tensor]:
    dtype, kv = accumulator_dtype(q.dtype), k.shape[1]
    qg, kd, vd = _grouped(q, kv, dtype), k.to(dtype), v.to(dtype)
    outs, lses = [], []
    for first in range(0, q.shape[2], _PLAIN_ROWS):
        scores, _ = _scores(qg[..., first : first + _PLAIN_ROWS, :], kd, block, first)
        lses.append(torch.logsumexp(scores, -1))
        # Not exp(scores - lse), whose sum misses 1 by a rounding of the log-sum-exp.
        outs.append(torch.matmul(torch.softmax(scores, -1), vd[:, :, None]))
    out, lse = torch.cat(outs, -2), torch.cat(lses, -1)
    return out.reshape(*q.shape[:3], v.shape[-1]).to(q.dtype), lse.reshape(q.shape[:3])


def _plain_backward(flow: Flow, block: Block) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    grad_out, q, k, v, out, lse = flow
    dtype, kv = accumulator_dtype(q.dtype), k.shape[1]
    qg, kd, vd = _grouped(q, kv, dtype), k.to(dtype), v.to(dtype)
    do, og = _grouped(grad_out, kv, dtype), _grouped(out, kv, dtype)
    lse_g = lse.reshape(*qg.shape[:4])
    dk, dv, dqs = torch.zeros_like(kd), torch.zeros_like(vd), []
    for first in range(0, q.shape[2], _PLAIN_ROWS):
        part = slice(first, first + _PLAIN_ROWS)
        scores, bent = _scores(qg[..., part, :], kd, block, first)
        weights = torch.exp(scores - lse_g[..., part, None])
        dv += torch.matmul(weights.transpose(-1, -2), do[..., part, :]).sum(2)
        delta = (do[..., part, :] * og[..., part, :]).sum(-1, keepdim=True)
        ds = weights * (torch.matmul(do[..., part, :], vd[:, :, None].transpose(-1, -2)) - delta)
        if bent is not None:
            ds = ds * (1 - bent * bent)
        ds = ds * block.scale
        dqs.append(torch.matmul(ds, kd[:, :, None]))
        dk += torch.matmul(ds.transpose(-1, -2), qg[..., part, :]).sum(2)
    dq = torch.cat(dqs, -2).reshape(q.shape)
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)
