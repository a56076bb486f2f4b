"""What a moved storage looks like in the store: its bytes, or fewer that say the same."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import torch

from tiercache.codecs import create_codec

Decode = Callable[[torch.Tensor], torch.Tensor]

_INTEGERS = frozenset(
    [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64]
)
# Compression has to save this share of a sample to be tried, and of the whole to be kept.
_WORTH = 0.25
_SAMPLE_BYTES = 1 << 16


class Packer:
    """Makes pages of moved bytes and bytes of pages."""

    def __init__(self) -> None:
        self._zstd = create_codec("zstd")

    def encode(self, flat: torch.Tensor, dtypes: set[torch.dtype]) -> tuple[torch.Tensor, Decode]:
        """A page, owned by the caller, and what turns it back into the bytes.

        Args:
            flat: uint8, one-dimensional, contiguous; may be returned as it is.
            dtypes: what the saved views show it as.
        """
        if len(dtypes) == 1:
            (dtype,) = dtypes
            if dtype == torch.bool:
                return pack_bits(flat), partial(unpack_bits, size=flat.numel())
            if dtype in _INTEGERS and flat.device.type == "cpu":
                small = self._compressed(flat)
                if small is not None:
                    return small, partial(self._decompressed, size=flat.numel())
            if flat.numel() % dtype.itemsize == 0:
                # The store's codecs go by dtype.
                return flat.view(dtype), as_bytes
        return flat, as_bytes

    def _compressed(self, flat: torch.Tensor) -> torch.Tensor | None:
        if flat.numel() > 4 * _SAMPLE_BYTES:
            middle = flat.numel() // 2
            sample = flat[middle : middle + _SAMPLE_BYTES]
            if self._encoded(sample).size > (1 - _WORTH) * sample.numel():
                return None
        found = self._encoded(flat)
        if found.size > (1 - _WORTH) * flat.numel():
            return None
        return torch.from_numpy(found.copy())

    def _encoded(self, flat: torch.Tensor) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
        out = np.empty(self._zstd.max_encoded_bytes(torch.uint8, tuple(flat.shape)), np.uint8)
        return out[: self._zstd.encode(flat, out)]

    def _decompressed(self, page: torch.Tensor, size: int) -> torch.Tensor:
        out = torch.empty(size, dtype=torch.uint8)
        self._zstd.decode(page.numpy(), out)
        return out


def as_bytes(page: torch.Tensor) -> torch.Tensor:
    """The page is the bytes."""
    return page.view(torch.uint8)


def pack_bits(flat: torch.Tensor) -> torch.Tensor:
    """Bytes that are 0 or 1, eight to a byte."""
    if flat.device.type != "cpu":
        return pack_bits_on_device(flat)
    return torch.from_numpy(np.packbits(flat.numpy(), bitorder="little"))


def unpack_bits(page: torch.Tensor, size: int) -> torch.Tensor:
    """The `size` bytes that were packed."""
    if page.device.type != "cpu":
        return unpack_bits_on_device(page, size)
    return torch.from_numpy(np.unpackbits(page.numpy(), count=size, bitorder="little"))


def pack_bits_on_device(flat: torch.Tensor) -> torch.Tensor:
    """`pack_bits` in operators that every device has."""
    padded = torch.nn.functional.pad(flat, (0, -flat.numel() % 8)).view(-1, 8)
    weights = torch.tensor([1 << bit for bit in range(8)], dtype=torch.uint8, device=flat.device)
    return (padded * weights).sum(1, dtype=torch.uint8)


def unpack_bits_on_device(page: torch.Tensor, size: int) -> torch.Tensor:
    """`unpack_bits` in operators that every device has."""
    shifts = torch.arange(8, dtype=torch.uint8, device=page.device)
    return ((page[:, None] >> shifts) & 1).view(-1)[:size].contiguous()
