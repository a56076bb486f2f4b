"""Latent pages: keys and values in the compressed form in which multi-head latent attention computes them.

A page holds the latent and the rotary key that all heads share. Attention expands one page at a time, with the
layer's own weights; its backward expands it again, with a graph, and drives what it owes the expanded keys and values
into the latent's gradient page and into the expansion's weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from tiercache.entry import PageKey
from tiercache.runtime.frame import Frame, LayerSpec, PageCall

Pair = tuple[torch.Tensor, torch.Tensor]
Expand = Callable[[torch.Tensor, torch.Tensor], Pair]


@dataclass(frozen=True, slots=True)
class Latents:
    """A visit's own latents in one layer, and how the layer expands any.

    Attributes:
        pair: latents [1, 1, T, C] and rotary keys [1, 1, T, R].
        expand: from such a pair to keys [1, K, T, Dk] and values [1, K, T, Dv].
    """

    pair: Pair
    expand: Expand

    @property
    def widths(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """Of a token in each page."""
        latent, rotary = self.pair
        return ((1, latent.shape[-1]), (1, rotary.shape[-1]))


class OpenPage:
    """Keys [K, N, Dk] and values [K, N, Dv] of one ancestor, while a product runs over them.

    Args:
        pages: what the store holds of it, two tensors.
        expand: of the layer, or None where the pages are keys and values themselves.
        with_graph: the product is a backward, and what it owes will be sent back.
    """

    def __init__(self, pages: Pair, expand: Expand | None, *, with_graph: bool) -> None:
        self._leaves: Pair | None = None
        self._expanded = pages
        if expand is not None:
            leaves = (pages[0][None].detach(), pages[1][None].detach())
            with torch.set_grad_enabled(with_graph):
                if with_graph:
                    self._leaves = (leaves[0].requires_grad_(), leaves[1].requires_grad_())
                keys, values = expand(*leaves)
                self._expanded = (keys[0], values[0])
        self.key, self.value = (page.detach() for page in self._expanded)

    def gradients(self, key: torch.Tensor, value: torch.Tensor) -> Pair:
        """What the stored pages get, of what the keys and values get; the expansion's weights get theirs."""
        if self._leaves is None:
            return key, value
        owed = [grad.to(page.dtype) for grad, page in zip((key, value), self._expanded, strict=True)]
        torch.autograd.backward(self._expanded, owed)
        grads = [leaf.grad if leaf.grad is not None else torch.zeros_like(leaf) for leaf in self._leaves]
        return grads[0][0], grads[1][0]


@contextmanager
def opened(
    frame: Frame, call: PageCall, layer: LayerSpec, expand: Expand | None, *, with_graph: bool = False
) -> Iterator[OpenPage]:
    """Leases an ancestor's two pages of a layer."""
    first, second = layer.kinds
    digest, index = call.ancestor.digest, layer.index
    with (
        frame.store.read(PageKey(digest, index, first)) as one,
        frame.store.read(PageKey(digest, index, second)) as two,
    ):
        yield OpenPage((one.tensor, two.tensor), expand, with_graph=with_graph)


def tapped(latent: torch.Tensor, rotary: torch.Tensor, frame: Frame, layer: Callable[[], LayerSpec]) -> Pair:
    """The pair itself; when the node is popped, its gradient pages join what flows back here.

    Args:
        latent: [1, 1, T, C].
        rotary: [1, 1, T, R].
        frame: the visit.
        layer: the layer's description, which its first attention call makes.
    """
    pair: Pair = _Tap.apply(latent, rotary, frame, layer)  # type: ignore[no-untyped-call]
    return pair


class _Tap(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, latent: torch.Tensor, rotary: torch.Tensor, frame: Frame, layer: Callable[[], LayerSpec]
    ) -> Pair:
        ctx.frame, ctx.layer = frame, layer
        return latent.view_as(latent), rotary.view_as(rotary)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        frame: Frame = ctx.frame
        if frame.phase != "pop":
            return (*grads, None, None)
        layer: LayerSpec = ctx.layer()
        sums = []
        for kind, grad in zip(layer.kinds, grads, strict=True):
            total = frame.store.take(
                PageKey(frame.pieces[0].digest, layer.index, f"grad_{kind}", frame.graph)
            )
            sums.append(grad if total is None else (grad.to(total.dtype) + total[None]).to(grad.dtype))
        return (*sums, None, None)
