"""What a page's bytes look like below the device: raw, or what a codec made of them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Protocol

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


class Source(Protocol):
    """A payload that can be written somewhere."""

    meta: PageMeta

    def data(self) -> ByteArray:
        """The payload as one array."""

    def into(self, out: ByteArray) -> None:
        """Fills `out`, of the payload's size."""


class ArraySource:
    """A payload that lies in addressable memory already."""

    def __init__(self, data: ByteArray, meta: PageMeta) -> None:
        self._data = data
        self.meta = meta

    def data(self) -> ByteArray:
        """The array itself."""
        return self._data

    def into(self, out: ByteArray) -> None:
        """Copies it."""
        np.copyto(out, self._data)


class LateSource:
    """A raw page in a device's own memory: `fetch` copies it to host memory and waits for that."""

    def __init__(self, fetch: Callable[[ByteArray], None], meta: PageMeta) -> None:
        self._fetch = fetch
        self.meta = meta

    def data(self) -> ByteArray:
        """A copy in fresh memory."""
        out = np.empty(self.meta.stored_bytes, np.uint8)
        self._fetch(out)
        return out

    def into(self, out: ByteArray) -> None:
        """Copies straight into `out`."""
        self._fetch(out)
