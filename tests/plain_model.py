"""A GPT in sixty lines that takes its attention as a callable, and computes in one dtype from end to end.

Transformers models keep norms and rotary tables in fp32 whatever their weights are; this one does not, so
that in fp64 a gradient can be compared to 1e-12.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu


class Block(nn.Module):
    """Pre-norm block with grouped-query attention over rotated queries and keys."""

    def __init__(self, layer: int, width: int, heads: int, kv_heads: int, **options: Any) -> None:
        super().__init__()
        self.layer, self.heads, self.kv_heads, self.options = layer, heads, kv_heads, options
        self.head_dim = width // heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, (heads + 2 * kv_heads) * self.head_dim, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x_BTC: Tensor, angle_BTD: Tensor, attention: Callable[..., Tensor]) -> Tensor:
        batch, length, _ = x_BTC.shape
        heads = self.qkv(self.norm_1(x_BTC)).view(batch, length, -1, self.head_dim).transpose(1, 2)
        q, k, v = heads.split([self.heads, self.kv_heads, self.kv_heads], dim=1)
        q, k = (rotate(x, angle_BTD) for x in (q, k))
        out = attention(q, k, v, layer=self.layer, **self.options).transpose(1, 2).flatten(2)
        x_BTC = x_BTC + self.out(out)
        return x_BTC + self.down(gelu(self.up(self.norm_2(x_BTC))))


class PlainGPT(nn.Module):
    """`model(input_ids, position_ids)` gives logits; `hidden` and `head` are its two halves."""

    def __init__(
        self,
        attention: Callable[..., Tensor],
        *,
        vocab=61,
        width=32,
        layers=3,
        heads=4,
        kv_heads=2,
        options=None,
    ) -> None:
        super().__init__()
        self.attention = attention
        options = options or [{}] * layers
        self.embed = nn.Embedding(vocab, width)
        self.blocks = nn.ModuleList(Block(i, width, heads, kv_heads, **options[i]) for i in range(layers))
        self.norm = nn.LayerNorm(width)
        self.register_buffer("frequencies", 0.3 ** torch.arange(width // heads // 2, dtype=torch.float64))

    def hidden(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        angle = position_ids[..., None].to(self.frequencies.dtype) * self.frequencies
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x, angle, self.attention)
        return self.norm(x)

    def head(self, hidden: Tensor) -> Tensor:
        return hidden @ self.embed.weight.T  # tied

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None) -> Tensor:
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1]).expand_as(input_ids)
        return self.head(self.hidden(input_ids, position_ids))


def rotate(x_BHTD: Tensor, angle_BTD: Tensor) -> Tensor:
    even, odd = x_BHTD.chunk(2, dim=-1)
    cos, sin = angle_BTD.cos()[:, None], angle_BTD.sin()[:, None]
    return torch.cat([even * cos - odd * sin, even * sin + odd * cos], dim=-1)


def dense_attention(q: Tensor, k: Tensor, v: Tensor, *, layer: int, **options: Any) -> Tensor:
    """Causal attention [B, Hq, T, D] over whole rows, written out: the reference for everything else."""
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = q @ k.transpose(-1, -2) * (options.get("scaling") or q.shape[-1] ** -0.5)
    if cap := options.get("softcap"):
        scores = cap * torch.tanh(scores / cap)
    age = torch.arange(q.shape[2])[:, None] - torch.arange(q.shape[2])
    hidden = (age < 0) | (age >= (options.get("sliding_window") or q.shape[2]))
    scores = scores.masked_fill(hidden, -torch.inf)
    if (sinks := options.get("s_aux")) is not None:
        scores = torch.cat([scores, sinks[:, None, None].expand(*scores.shape[:-1], 1)], -1)
    return torch.softmax(scores, -1)[..., : k.shape[2]] @ v


def build_plain(
    attention: Callable[..., Tensor] = dense_attention, *, dtype=torch.float64, seed=0, **shape: Any
) -> PlainGPT:
    """A plain model with every parameter drawn from `seed`."""
    from model_zoo import randomise

    model = PlainGPT(attention, **shape).to(dtype)
    randomise(model, seed)
    return model
