"""The const codec: byte planes that are equal in all elements are stored once. A fast test, else a copy.

fp32 that was made from bf16 has two planes of zeros; a page that is one value is a few bytes.
"""

from __future__ import annotations

import torch

from tiercache import _core
from tiercache.codecs.base import ByteArray, Codec
from tiercache.codecs.views import contiguous_bytes, num_tensor_bytes, require_room, writable_bytes
from tiercache.entry import PageKey


def plane_width(dtype: torch.dtype) -> int:
    """Bytes of what the planes are cut from: an element, or a complex element's parts."""
    return min(dtype.itemsize, 8)


class ConstCodec(Codec):
    """One byte that marks the constant planes, their values, then the other bytes of each element."""

    name = "const"

    def max_encoded_bytes(self, dtype: torch.dtype, shape: tuple[int, ...]) -> int:
        """The tensor's bytes and one."""
        return num_tensor_bytes(dtype, shape) + 1

    def encode(self, tensor: torch.Tensor, out: ByteArray, key: PageKey | None = None) -> int:
        """Writes the planes into `out`; returns the payload's size in bytes."""
        data = contiguous_bytes(tensor)
        require_room(self.name, out, data.size + 1)
        return int(_core.planes_encode(data, plane_width(tensor.dtype), out))

    def decode(self, payload: ByteArray, out: torch.Tensor) -> None:
        """Fills `out`. Raises CodecError when the payload is not one of its size."""
        _core.planes_decode(payload, plane_width(out.dtype), writable_bytes(out))
