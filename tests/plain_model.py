"""A GPT in sixty lines that takes its attention as a callable, and computes in one dtype from end to end.

Transformers models keep norms and rotary tables in fp32 whatever their weights are; this one does not, so
that in fp64 a gradient can be compared to 1e-12.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from model_zoo import VOCAB, randomise, seeded
from torch import Tensor, nn
from torch.nn.functional import gelu


class Block(nn.Module):
    """Pre-norm block with grouped-query attention over rotated queries and keys."""

    def __init__(self, layer: int, width: int, heads: int, kv_heads: int, options: dict[str, Any]) -> None:
        super().__init__()
        self.layer, self.heads, self.kv_heads, self.options = layer, heads, kv_heads, options
        self.head_dim = width // heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, (heads + 2 * kv_heads) * self.head_dim, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x_BTC: Tensor, angle_BTD: Tensor, attention: Callable[..., Tensor]) -> Tensor:
        heads = self.qkv(self.norm_1(x_BTC)).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        q, k, v = heads.split([self.heads, self.kv_heads, self.kv_heads], dim=1)
        q, k = rotate(q, angle_BTD), rotate(k, angle_BTD)
        out = attention(q, k, v, layer=self.layer, **self.options).transpose(1, 2).flatten(2)
        x_BTC = x_BTC + self.out(out)
        return x_BTC + self.down(gelu(self.up(self.norm_2(x_BTC))))


class PlainGPT(nn.Module):
    """Tied embeddings, rotary positions; `options[i]` goes to layer i's attention (window, ...)."""

    def __init__(
        self, attention: Callable[..., Tensor], options: list[dict[str, Any]], width: int = 32
    ) -> None:
        super().__init__()
        self.attention, self.vocab_size = attention, VOCAB
        self.embed = nn.Embedding(VOCAB, width)
        self.layers = nn.ModuleList(Block(i, width, 4, 2, each) for i, each in enumerate(options))
        self.norm = nn.LayerNorm(width)
        self.register_buffer("frequencies", 0.3 ** torch.arange(width // 8, dtype=torch.float64))

    def hidden(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        angle = position_ids[..., None].to(self.frequencies.dtype) * self.frequencies
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x, angle, self.attention)
        return self.norm(x)

    def project(self, hidden: Tensor) -> Tensor:
        return hidden @ self.embed.weight.T

    def forward(self, input_ids: Tensor) -> Tensor:
        position_ids = torch.arange(input_ids.shape[1]).expand_as(input_ids)
        return self.project(self.hidden(input_ids, position_ids))


def rotate(x_BHTD: Tensor, angle_BTD: Tensor) -> Tensor:
    even, odd = x_BHTD.chunk(2, dim=-1)
    cos, sin = angle_BTD.cos()[:, None], angle_BTD.sin()[:, None]
    return torch.cat([even * cos - odd * sin, even * sin + odd * cos], dim=-1)


def build_plain(
    attention: Callable[..., Tensor],
    *,
    dtype: torch.dtype = torch.float64,
    options: list[dict[str, Any]] | None = None,
) -> PlainGPT:
    """A plain model whose parameters are the same at every call."""
    with seeded(0):
        model = PlainGPT(attention, options or [{}, {}, {}])
    randomise(model, seed=0)
    return model.to(dtype)
