"""What a page's bytes look like below the device: raw, or what a codec made of them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import Protocol

import numpy as np
import torch

from tiercache.codecs.base import Codec
from tiercache.entry import Entry, PageKey
from tiercache.errors import ConfigError
from tiercache.tiers.base import ByteArray, PageMeta, Tier

# Kinds that a lossy codec given alone applies to: what attention reads, and nothing that pop recomputes from.
LOSSY_KINDS = ("key", "value", "state")


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


class PageCodecs:
    """The codec of every kind of page.

    Args:
        choice: one codec's name, or names by kind with "*" for the rest.
        create: makes a codec by name.

    Raises:
        ConfigError: a gradient kind with a lossy codec.
    """

    def __init__(self, choice: str | Mapping[str, str], create: Callable[[str], Codec]) -> None:
        names = {"*": choice} if isinstance(choice, str) else dict(choice)
        self._codecs = {name: create(name) for name in sorted({*names.values(), "raw"})}
        self._by_kind = {kind: self._codecs[name] for kind, name in names.items()}
        for kind, codec in self._by_kind.items():
            if kind.startswith("grad_") and not codec.lossless:
                raise ConfigError(
                    f"codec: gradient pages of kind {kind!r} are never lossy",
                    got=codec.name,
                    remedy="name a lossless codec for them",
                )

    def of(self, key: PageKey, *, is_sum: bool) -> Codec | None:
        """The codec of a page; None stands for raw bytes, which sums always are."""
        codec = self._by_kind.get(key.kind)
        if codec is None:
            codec = self._by_kind.get("*")
            if codec is not None and not codec.lossless and key.kind not in LOSSY_KINDS:
                codec = None
        if codec is None or codec.name == "raw" or is_sum:
            return None
        return codec

    def can_decode(self, meta: PageMeta) -> bool:
        """Whether a record of an earlier process was made by a codec of this store."""
        return meta.codec in self._codecs

    def encode(self, entry: Entry, tensor: torch.Tensor, namespace: bytes) -> ArraySource:
        """The payload of a CPU tensor: what the codec makes of it, or raw bytes where that is no smaller."""
        codec: Codec | None = entry.payload_codec
        if codec is not None:
            out = np.empty(codec.max_encoded_bytes(entry.dtype, entry.shape), np.uint8)
            size = codec.encode(tensor, out, entry.key)
            if size < entry.num_bytes:
                return ArraySource(out[:size], page_meta(entry, namespace, codec.name, size))
        return ArraySource(bytes_of(tensor), page_meta(entry, namespace, "raw", entry.num_bytes))

    def encode_again(self, entry: Entry, fixed: torch.Tensor, namespace: bytes) -> ArraySource:
        """The payload of a page whose values are fixed: a lossy codec is kept only if it gives them back."""
        source = self.encode(entry, fixed, namespace)
        codec: Codec | None = entry.payload_codec
        if codec is None or codec.lossless or source.meta.codec == "raw":
            return source
        back = torch.empty(entry.shape, dtype=entry.dtype)
        codec.decode(source.data(), back)
        if np.array_equal(bytes_of(back), bytes_of(fixed)):
            return source
        return ArraySource(bytes_of(fixed), page_meta(entry, namespace, "raw", entry.num_bytes))

    def fix(self, entry: Entry, tensor: torch.Tensor, out: torch.Tensor) -> None:
        """Fills `out` with what a lossy codec makes of a CPU tensor: the page's values from now on."""
        codec: Codec = entry.payload_codec
        payload = np.empty(codec.max_encoded_bytes(entry.dtype, entry.shape), np.uint8)
        size = codec.encode(tensor, payload, entry.key)
        codec.decode(payload[:size], out)

    def decode(self, payload: ByteArray, meta: PageMeta, out: torch.Tensor) -> None:
        """Fills a contiguous CPU tensor from a payload."""
        if meta.codec == "raw":
            np.copyto(bytes_of(out), payload)
        else:
            self._codecs[meta.codec].decode(payload, out)
