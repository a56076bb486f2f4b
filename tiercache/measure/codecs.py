"""Codecs on one page of bf16, on one core as a store's transfer threads run them."""

from __future__ import annotations

import numpy as np
import torch

from tiercache.codecs import CODECS, create_codec
from tiercache.entry import PageKey
from tiercache.measure.timing import Budget, Work, beside, time_of
from tiercache.profile import CodecSpeed

_SHAPE = (8, 8192, 64)
_LEFT_OUT = ("auto", "const")  # a choice among the others, and one for pages that are all one value


def measure_codecs(arithmetic: Work, budget: Budget) -> dict[str, CodecSpeed]:
    """Every codec's ratio and speeds, alone and beside arithmetic."""
    generator = torch.Generator().manual_seed(0)
    page = torch.randn(_SHAPE, generator=generator).bfloat16()
    return {name: _measure(name, page, arithmetic, budget) for name in CODECS if name not in _LEFT_OUT}


def _measure(name: str, page: torch.Tensor, arithmetic: Work, budget: Budget) -> CodecSpeed:
    codec, key = create_codec(name), PageKey(bytes(32), 0, "key")
    out = np.empty(codec.max_encoded_bytes(page.dtype, tuple(page.shape)), np.uint8)
    back = torch.empty_like(page)
    used = codec.encode(page, out, key)
    payload = out[:used].copy()

    def encode() -> None:
        codec.encode(page, out, key)

    def decode() -> None:
        codec.decode(payload, back)

    num_bytes = page.numel() * page.element_size()
    kept, share = beside(decode, arithmetic, budget)
    return CodecSpeed(
        ratio=num_bytes / used,
        encode_bytes_per_s=num_bytes / time_of(encode, budget),
        decode_bytes_per_s=num_bytes / time_of(decode, budget),
        beside_compute=kept,
        compute_share=share,
    )
