"""Pages that look like what models hold, and pages that look like nothing: for every codec test."""

from __future__ import annotations

import numpy as np
import torch

from tiercache.entry import PageKey


def page_key(kind="key", layer=3, node=1):
    return PageKey(bytes([node]) * 32, layer, kind)


def activations(shape=(1, 3, 400, 64), *, seed=0, scale=1.0):
    """bf16 with channel scales, token scales, zeros and massive outliers, as keys and residuals have."""
    generator = torch.Generator().manual_seed(seed)
    channels = torch.randn(shape[-1], generator=generator).exp()
    tokens = torch.randn(shape[:-1], generator=generator).mul(0.5).exp().unsqueeze(-1)
    values = torch.randn(shape, generator=generator) * channels * tokens * scale
    flat = values.view(-1)
    flat[:: max(flat.numel() // 97, 1)] = 0
    flat[5 :: max(flat.numel() // 31, 6)] *= 3e4
    return values.to(torch.bfloat16)


def odd_pages():
    """Named bf16 pages at the edges of what a codec may meet."""
    generator = torch.Generator().manual_seed(1)
    words = torch.randint(-32768, 32768, (70_000,), generator=generator, dtype=torch.int32).to(torch.int16)
    return {
        "activations": activations(),
        "wide": activations((130, 576)),
        "long_rows": activations((3, 40_000)),
        "many_blocks": activations((5, 300, 192)),
        "odd_columns": activations((67, 1031)),
        "head_of_80": activations((2, 70, 80)),
        "noise": words.view(torch.bfloat16),
        "zeros": torch.zeros(4, 1000, dtype=torch.bfloat16),
        "half_zeros": activations((64, 512)).relu(),
        "one_value": torch.full((9, 700), -1.5, dtype=torch.bfloat16),
        "two_exponents": torch.where(words > 0, 1.0, 2.5).to(torch.bfloat16),
        "denormals": (words & 0x7F).view(torch.bfloat16),
        "infinite": activations((64, 64)).masked_fill(words[:4096].view(64, 64) > 30000, float("inf")),
        "huge_and_tiny": torch.where(words % 2 == 0, 1e38, 1e-38).to(torch.bfloat16),
        "short": activations((63,)),
        "empty": torch.zeros(0, 64, dtype=torch.bfloat16),
    }


def encoded(codec, tensor, key=None):
    out = np.zeros(codec.max_encoded_bytes(tensor.dtype, tuple(tensor.shape)), np.uint8)
    return out[: codec.encode(tensor, out, key)].copy()


def decoded(codec, payload, like):
    out = torch.empty(like.shape, dtype=like.dtype)
    codec.decode(payload, out)
    return out


def same_bits(a, b):
    view = [t.contiguous().reshape(-1).view(torch.uint8) for t in (a, b)]
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(*view)
