"""The contract of a codec: bytes of a page, smaller or not, and back."""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np
import numpy.typing as npt
import torch

from tiercache.entry import PageKey

ByteArray = npt.NDArray[np.uint8]


class Codec(ABC):
    """Turns a CPU tensor into bytes and back.

    Caller guarantees: `out` of encode has `max_encoded_bytes(tensor)` bytes; `out` of decode has the dtype
    and shape that were encoded, as the store's own index says.
    Implementation must: never modify its input; take any strides; keep every bit pattern when `lossless`;
    trust nothing in the payload but what fits `out`: malformed bytes raise CodecError and never read or
    write outside; be safe from several threads; release the GIL around work.
    """

    name: str
    lossless: bool = True
    stable: bool = True  # encoding what it decoded gives those values again, so a page may be encoded twice
    minds_speed: bool = False  # of the tier, which `tell_speed` and `observe` tell

    @abstractmethod
    def max_encoded_bytes(self, dtype: torch.dtype, shape: tuple[int, ...]) -> int:
        """Upper bound of what `encode` writes."""

    @abstractmethod
    def encode(self, tensor: torch.Tensor, out: ByteArray, key: PageKey | None = None) -> int:
        """Writes the payload into `out` and returns its size in bytes.

        `key` tells what the page holds: codecs with tables share one per (layer, kind), lossy ones choose the
        axis of their scales by kind, refuse gradient pages, and key their random numbers by it.
        """

    def tell_speed(self, read_gbps: float) -> None:  # noqa: B027 - most codecs do not mind
        """Tells how fast the tier gives bytes back, in 1e9 bytes a second."""

    def observe(self, num_bytes: int, seconds: float) -> None:  # noqa: B027 - likewise
        """Tells how long the tier took to read so many bytes."""

    def leaves(self, payload: ByteArray | None, dtype: torch.dtype, key: PageKey, num_bytes: int) -> bool:
        """Whether a page may go down as it lies above, so that nobody borrows memory and copies for nothing.

        `payload`: what the tier above has of this codec's; None for raw bytes.
        """
        return False

    @abstractmethod
    def decode(self, payload: ByteArray, out: torch.Tensor) -> None:
        """Fills the contiguous CPU tensor `out` from the payload."""
