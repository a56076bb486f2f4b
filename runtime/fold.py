"""Query heads that share a key-value head, folded for one product with a page."""

from __future__ import annotations

from dataclasses import replace

import torch

from tiercache.runtime import native_attention
from tiercache.runtime.frame import LayerSpec, PageCall
from tiercache.runtime.kernels import Block, accumulator_dtype

_MIN_SLICE = 64  # queries below which cutting a fold further costs more than an idle core


class Fold:
    """Query heads that share a key-value head, folded into the length axis, and cut until every core has a
    slice.

    q [1, H, n, D] becomes [s, K, g * n / s, D] with g = H / K: the page is read once for all of them. Kernels that
    read a page once for all its heads by themselves get q as it is: K and g are H and 1.
    """

    def __init__(self, q: torch.Tensor, layer: LayerSpec, call: PageCall, block: Block) -> None:
        self.call = call
        _, heads, self.length, _ = q.shape
        kv_heads, value_width = layer.value_page
        self.block = Block(block.scale, bias=call.bias, softcap=block.softcap)
        self.kv, self.group, self.slices = heads, 1, 1
        if not native_attention.serves(q, value_width, self.block):
            self.kv, self.group = kv_heads, heads // kv_heads
            if call.bias is not None:
                bias = call.bias[None].expand(self.group, -1, -1).reshape(-1, call.bias.shape[-1])
                self.block = replace(self.block, bias=bias)
            elif q.device.type == "cpu":
                self.slices = _slices(kv_heads, self.group * self.length, torch.get_num_threads())
        self.q = self.fold(q)

    def fold(self, x: torch.Tensor) -> torch.Tensor:
        """[1, H, n, D] -> [s, K, g * n / s, D]."""
        width = x.shape[-1]
        folded = x.reshape(1, self.kv, self.slices, -1, width)
        return folded.transpose(0, 2).squeeze(2) if self.slices > 1 else folded[:, :, 0]

    def unfold(self, x: torch.Tensor) -> torch.Tensor:
        """[s, K, g * n / s, D] -> [1, H, n, D]."""
        return x.transpose(0, 1).reshape(1, self.kv * self.group, self.length, x.shape[-1])

    def page(self, page: torch.Tensor) -> torch.Tensor:
        """[K, N, D] -> [s, K, n, D]: the seen keys, repeated without a copy."""
        return page[None, :, self.call.k_begin : self.call.k_end].expand(self.slices, -1, -1, -1)

    def page_gradient(self, grad: torch.Tensor) -> torch.Tensor:
        """[s, K, n, D] -> [K, N, D], zero where no query sees the page."""
        total = grad[0] if self.slices == 1 else grad.sum(0, dtype=accumulator_dtype(grad.dtype))
        hidden = self.call.k_begin
        return torch.nn.functional.pad(total, (0, 0, hidden, 0)) if hidden else total


def _slices(kv_heads: int, length: int, threads: int) -> int:
    """The fewest cuts of the length axis that share the slices evenly among the cores."""
    for cuts in range(1, threads + 1):
        if kv_heads * cuts % threads == 0 and length % cuts == 0 and length // cuts >= _MIN_SLICE:
            return cuts
    return 1
