"""What a page's bytes look like below the device: raw, or what a codec made of them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import numpy as np
import torch

from tiercache.entry import Entry, PageKey
from tiercache.tiers.base import ByteArray, PageMeta, Tier


def bytes_of(tensor: torch.Tensor) -> ByteArray:
    """The memory of a contiguous CPU tensor."""
    flat: ByteArray = tensor.reshape(-1).view(torch.uint8).numpy()
    return flat


def as_tensor(data: ByteArray, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """A tensor over that memory."""
    return torch.from_numpy(data).view(dtype).view(shape)


def is_addressable(tier: Tier) -> bool:
    """Whether the tier's slots are memory that can be worked on in place."""
    return type(tier).view is not Tier.view


def record_digest(key: PageKey, namespace: bytes) -> bytes:
    """32-byte name of a page's record: the same page of another namespace is another record."""
    return hashlib.blake2b(key.digest, key=namespace, digest_size=32).digest()


def page_meta(entry: Entry, namespace: bytes, codec: str, stored_bytes: int) -> PageMeta:
    """The record of a page's payload."""
    return PageMeta(
        digest=record_digest(entry.key, namespace),
        namespace=namespace,
        dtype=str(entry.dtype).removeprefix("torch."),
        shape=entry.shape,
        codec=codec,
        raw_bytes=entry.num_bytes,
        stored_bytes=stored_bytes,
        key=entry.key,
        persistent=entry.persistent,
    )


class Source:
    """A payload that can be written into a tier.

    Args:
        meta: its record.
        fill: writes it into an array of its size.
        data: the payload where it lies in memory already; tiers that are not addressable need it.
    """

    def __init__(
        self, meta: PageMeta, fill: Callable[[ByteArray], object], data: ByteArray | None = None
    ) -> None:
        self.meta = meta
        self.fill = fill
        self.data = data

    @classmethod
    def of(cls, data: ByteArray, meta: PageMeta) -> Source:
        """A payload that lies in memory."""
        return cls(meta, lambda out: np.copyto(out, data), data)
