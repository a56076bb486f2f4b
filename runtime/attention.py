"""Attention of a visit's nodes over their own tokens and their ancestors' pages.

Forward: each node's own causal block, then one page at a time, merged by log-sum-exp. Backward: the flash
backward of each block with the final output and log-sum-exp gives the block's exact dQ, dK, dV; dK and dV of
a page are added to its gradient page. Legend: H query heads, K key-value heads, T packed tokens, N tokens of
a page, D width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from tiercache.entry import PageKey
from tiercache.runtime.fold import Fold
from tiercache.runtime.frame import Frame, LayerSpec, PageCall, Piece, spent_ancestors
from tiercache.runtime.kernels import Block, accumulator_dtype, block_backward, block_forward
from tiercache.runtime.latents import Expand, Latents, opened
from tiercache.runtime.pages import check_recomputed
from tiercache.runtime.selection import Selection, selected, selected_bias, selected_call


def page_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    frame: Frame,
    layer: LayerSpec,
    scale: float,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    latents: Latents | None = None,
    selection: Selection | None = None,
) -> torch.Tensor:
    """Attention output [1, H, T, Dv] of a visit's packed tokens.

    Args:
        q: [1, H, T, Dk] after rotary embedding.
        k: [1, K, T, Dk].
        v: [1, K, T, Dv].
        frame: the visit.
        layer: which pages to read, and the layer's window.
        scale: factor on the scores.
        softcap: soft cap of the scores, or None.
        sinks: [H] logits that join each head's softmax once, or None.
        latents: what k and v were expanded from, where pages hold that instead of them.
        selection: the keys that each query attends to, or None for all that it sees.

    Pages are leased one at a time. Differentiable once in q, k, v and sinks; gradients of ancestors' pages go
    to the store. Calling it again with the same arguments (gradient checkpointing) gives the same values.
    """
    block = Block(scale, softcap=softcap)
    out: torch.Tensor = _PageAttention.apply(  # type: ignore[no-untyped-call]
        q, k, v, sinks, frame, layer, block, latents, selection
    )
    return out


class _PageAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        sinks: torch.Tensor | None,
        frame: Frame,
        layer: LayerSpec,
        block: Block,
        latents: Latents | None,
        selection: Selection | None,
    ) -> torch.Tensor:
        expand = None if latents is None else latents.expand
        kept = _take_kept(frame, layer) if frame.keep_attention and frame.phase == "pop" else None
        if kept is None:
            with selected(selection) as positions:
                out, lse = _forward(q, k, v, frame, layer, block, expand, positions)
            out, lse = _add_sinks(out, lse, sinks)
            out = out.to(q.dtype)
        else:
            out, lse = kept
        if frame.keep_attention and frame.phase == "capture":
            frame.keep_once(layer)
            frame.store.put(_own_key(frame, layer, "attention_output"), out)
            frame.store.put(_own_key(frame, layer, "attention_lse"), lse)
        _write_pages((k, v) if latents is None else latents.pair, frame, layer)
        ctx.save_for_backward(q, k, v, out, lse, sinks)
        ctx.frame, ctx.layer, ctx.block = frame, layer, block
        ctx.selection = selection
        ctx.expand = expand  # the latents themselves would keep their graph
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, out, lse, sinks = ctx.saved_tensors
        frame, layer = ctx.frame, ctx.layer
        with selected(ctx.selection) as positions:
            dq, dk, dv = _backward(
                grad_out, q, k, v, out, lse, frame, layer, ctx.block, ctx.expand, positions
            )
        if frame.phase == "pop" and ctx.expand is None:
            _add_gradient_page(dk, frame, layer, "grad_key")
            _add_gradient_page(dv, frame, layer, "grad_value")
        dsinks = None
        if sinks is not None and ctx.needs_input_grad[3]:
            dtype = lse.dtype
            delta = (grad_out.to(dtype) * out.to(dtype)).sum(-1)
            dsinks = -(torch.exp(sinks.to(dtype)[None, :, None] - lse) * delta).sum((0, 2)).to(sinks.dtype)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), dsinks, None, None, None, None, None


def _add_sinks(
    out: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Lets each head's sink join its softmax, once."""
    if sinks is None:
        return out, lse
    sinks = sinks.to(lse.dtype)[None, :, None]
    return out.mul_(torch.sigmoid(lse - sinks)[..., None]), torch.logaddexp(lse, sinks)


def _take_kept(frame: Frame, layer: LayerSpec) -> tuple[torch.Tensor, torch.Tensor] | None:
    """What capture left of this layer, so that the recomputation skips its attention."""
    out = frame.store.take(_own_key(frame, layer, "attention_output"))
    lse = frame.store.take(_own_key(frame, layer, "attention_lse"))
    return None if out is None or lse is None else (out, lse)


def _own_key(frame: Frame, layer: LayerSpec, kind: str) -> PageKey:
    """A page of the node that is visited, which belongs to this graph alone."""
    return PageKey(frame.pieces[0].digest, layer.index, kind, frame.graph)


def _own_block(
    frame: Frame, layer: LayerSpec, piece: Piece, block: Block, positions: torch.Tensor | None
) -> Block:
    length = piece.end - piece.begin
    bias = frame.own_bias(length, layer.window)
    if positions is not None:
        bias = selected_bias(positions[piece.begin : piece.end], piece.position, length, bias)
    return Block(block.scale, causal=bias is None, bias=bias, softcap=block.softcap)


def _forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    frame: Frame,
    layer: LayerSpec,
    block: Block,
    expand: Expand | None,
    positions: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merged output and log-sum-exp, both in the accumulator dtype."""
    dtype = accumulator_dtype(q.dtype)
    out = torch.empty(*q.shape[:3], v.shape[-1], dtype=dtype, device=q.device)
    lse = torch.empty(q.shape[:3], dtype=dtype, device=q.device)
    for piece in frame.pieces:
        own = slice(piece.begin, piece.end)
        part, part_lse = block_forward(
            q[:, :, own], k[:, :, own], v[:, :, own], _own_block(frame, layer, piece, block, positions)
        )
        out[:, :, own], lse[:, :, own] = part, part_lse
    for seen in frame.calls(layer.window):
        call = selected_call(seen, positions)
        queries = slice(call.q_begin, call.q_end)
        fold = Fold(q[:, :, queries], layer, call, block)
        with opened(frame, call, layer, expand) as page:
            part, part_lse = block_forward(fold.q, fold.page(page.key), fold.page(page.value), fold.block)
            _merge(
                out[:, :, queries],
                lse[:, :, queries],
                fold.unfold(part),
                fold.unfold(part_lse[..., None])[..., 0],
            )
    return out, lse


def _merge(out: torch.Tensor, lse: torch.Tensor, part: torch.Tensor, part_lse: torch.Tensor) -> None:
    """Adds a block's output into `out` and `lse`, in place.

    The two weights are `w` and `1 - w`. As exp(lse - total) each they would miss a sum of 1 by a rounding of the
    log-sum-exp, several times that of a weight; where a query looks at one key almost alone, backward subtracts nearly
    equal numbers and shows it.
    """
    part_lse = part_lse.to(lse.dtype)
    out.lerp_(part.to(out.dtype), torch.sigmoid(part_lse - lse)[..., None])
    lse.copy_(torch.logaddexp(lse, part_lse))


def _backward(
    grad_out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    frame: Frame,
    layer: LayerSpec,
    block: Block,
    expand: Expand | None,
    positions: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    dtype = accumulator_dtype(q.dtype)
    dq = torch.empty(q.shape, dtype=dtype, device=q.device)
    dk = torch.empty(k.shape, dtype=dtype, device=q.device)
    dv = torch.empty(v.shape, dtype=dtype, device=q.device)
    for piece in frame.pieces:
        own = slice(piece.begin, piece.end)
        dq[:, :, own], dk[:, :, own], dv[:, :, own] = block_backward(
            grad_out[:, :, own], q[:, :, own], k[:, :, own], v[:, :, own], out[:, :, own], lse[:, :, own],
            _own_block(frame, layer, piece, block, positions),
        )  # fmt: skip
    for seen in frame.calls(layer.window):
        call = selected_call(seen, positions)
        queries = slice(call.q_begin, call.q_end)
        fold = Fold(q[:, :, queries], layer, call, block)
        trainable = call.ancestor.trainable
        with opened(frame, call, layer, expand, with_graph=trainable) as page:
            dq_part, dk_page, dv_page = block_backward(
                fold.fold(grad_out[:, :, queries]), fold.q, fold.page(page.key), fold.page(page.value),
                fold.fold(out[:, :, queries]), fold.fold(lse[:, :, queries, None])[..., 0], fold.block,
            )  # fmt: skip
            dq[:, :, queries] += fold.unfold(dq_part)
            if trainable:
                owed = page.gradients(fold.page_gradient(dk_page), fold.page_gradient(dv_page))
        if trainable:
            for kind, grad in zip(layer.kinds, owed, strict=True):
                frame.store.accumulate(_key(call, layer, f"grad_{kind}", frame.graph), grad)
    _release_spent(frame, layer)
    return dq, dk, dv


def _release_spent(frame: Frame, layer: LayerSpec) -> None:
    """Gives back the pages of this layer that nobody will attend to: sums grow while they go."""
    for ancestor in spent_ancestors(frame, layer.window):
        for kind in layer.kinds:
            frame.store.release(PageKey(ancestor.digest, layer.index, kind))


def _key(call: PageCall, layer: LayerSpec, kind: str, graph: int) -> PageKey:
    return PageKey(call.ancestor.digest, layer.index, kind, graph)


def _write_pages(pair: tuple[torch.Tensor, torch.Tensor], frame: Frame, layer: LayerSpec) -> None:
    """At capture, puts this node's pages; in a checked pop, compares the recomputed ones with them."""
    if frame.phase not in ("capture", "pop"):
        return
    digest = frame.pieces[0].digest
    for kind, tensor in zip(layer.kinds, pair, strict=True):
        key = PageKey(digest, layer.index, kind)
        if frame.phase == "capture":
            frame.store.put(key, tensor[0].detach())
        elif frame.debug:
            check_recomputed(frame.store, key, tensor[0], layer.name)


def _add_gradient_page(grad: torch.Tensor, frame: Frame, layer: LayerSpec, kind: str) -> None:
    """Adds what the descendants sent back into this node's page to `grad`, in place."""
    total = frame.store.take(_own_key(frame, layer, kind))
    if total is not None:
        grad[0] += total
