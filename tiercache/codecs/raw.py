"""The raw codec: bytes as they are. For pages that don't compress, and wherever compression doesn't pay."""

from __future__ import annotations

import numpy as np
import torch

from tiercache.codecs.base import ByteArray, Codec
from tiercache.codecs.views import contiguous_bytes, num_tensor_bytes, require_room, writable_bytes
from tiercache.entry import PageKey
from tiercache.errors import CodecError


class RawCodec(Codec):
    """Copies bytes. The payload is the tensor in C order."""

    name = "raw"

    def max_encoded_bytes(self, dtype: torch.dtype, shape: tuple[int, ...]) -> int:
        """Exactly the tensor's bytes."""
        return num_tensor_bytes(dtype, shape)

    def encode(self, tensor: torch.Tensor, out: ByteArray, key: PageKey | None = None) -> int:
        """Copies the tensor into `out`; returns its size in bytes."""
        data = contiguous_bytes(tensor)
        require_room(self.name, out, data.size)
        np.copyto(out[: data.size], data)
        return data.size

    def decode(self, payload: ByteArray, out: torch.Tensor) -> None:
        """Copies the payload into `out`.

        Raises:
            CodecError: the payload has not exactly the size of `out`.
        """
        target = writable_bytes(out)
        if payload.size != target.size:
            raise CodecError(
                "raw payload has the wrong size", got=f"{payload.size} bytes", limit=f"{target.size} bytes"
            )
        np.copyto(target, payload)
