"""The zstd codec: general compression for dtypes that the exponent codec does not know, for cold pages."""

from __future__ import annotations

import threading

import numpy as np
import torch
import zstandard

from tiercache.codecs.base import ByteArray, Codec
from tiercache.codecs.views import contiguous_bytes, num_tensor_bytes, require_room, writable_bytes
from tiercache.entry import PageKey
from tiercache.errors import CodecError, ConfigError

_STORED, _FRAME = 0, 1


class ZstdCodec(Codec):
    """One byte that says stored or frame, then the bytes; a frame that would not be smaller is stored.

    Each thread has its own compressor and decompressor, which zstandard needs.

    Args:
        level: zstd's level, 1 (fast) to 19.

    Raises:
        ConfigError: the level is out of range.
    """

    name = "zstd"

    def __init__(self, *, level: int = 1) -> None:
        if not 1 <= level <= 19:
            raise ConfigError("zstd level", got=level, limit="1 to 19")
        self.level = level
        self._local = threading.local()

    def max_encoded_bytes(self, dtype: torch.dtype, shape: tuple[int, ...]) -> int:
        """The tensor's bytes and one."""
        return num_tensor_bytes(dtype, shape) + 1

    def encode(self, tensor: torch.Tensor, out: ByteArray, key: PageKey | None = None) -> int:
        """Compresses into `out`; returns the payload's size in bytes."""
        data = contiguous_bytes(tensor)
        require_room(self.name, out, data.size + 1)
        frame = self._compressor().compress(data.data) if data.size else b""
        if not frame or len(frame) >= data.size:
            out[0] = _STORED
            np.copyto(out[1 : data.size + 1], data)
            return data.size + 1
        out[0] = _FRAME
        out[1 : len(frame) + 1] = np.frombuffer(frame, np.uint8)
        return len(frame) + 1

    def decode(self, payload: ByteArray, out: torch.Tensor) -> None:
        """Decompresses into `out`; needs one transient copy of it, and never more, whatever the frame claims.

        Raises:
            CodecError: the payload is malformed or not of the size of `out`.
        """
        target = writable_bytes(out)
        if payload.size == 0 or payload[0] > _FRAME:
            raise CodecError("zstd payload has no valid mode byte", got=f"{payload.size} bytes")
        body = payload[1:]
        if payload[0] == _STORED:
            if body.size != target.size:
                raise CodecError(
                    "stored payload has the wrong size",
                    got=f"{body.size} bytes",
                    limit=f"{target.size} bytes",
                )
            np.copyto(target, body)
            return
        np.copyto(target, np.frombuffer(self._decompress(body, target.size), np.uint8))

    def _decompress(self, body: ByteArray, num_bytes: int) -> bytes:
        try:
            claimed = zstandard.frame_content_size(body.data)
            # A frame's own claim is what the library allocates, so it is compared before anything is.
            if claimed != num_bytes:
                raise CodecError("zstd frame claims a wrong size", got=claimed, limit=f"{num_bytes} bytes")
            data: bytes = self._decompressor().decompress(body.data, allow_extra_data=False)
        except zstandard.ZstdError as error:
            raise CodecError(f"zstd frame is malformed: {error}") from error
        if len(data) != num_bytes:
            raise CodecError("zstd frame has the wrong size", got=len(data), limit=f"{num_bytes} bytes")
        return data

    def _compressor(self) -> zstandard.ZstdCompressor:
        if not hasattr(self._local, "compressor"):
            self._local.compressor = zstandard.ZstdCompressor(level=self.level)
        compressor: zstandard.ZstdCompressor = self._local.compressor
        return compressor

    def _decompressor(self) -> zstandard.ZstdDecompressor:
        if not hasattr(self._local, "decompressor"):
            self._local.decompressor = zstandard.ZstdDecompressor()
        decompressor: zstandard.ZstdDecompressor = self._local.decompressor
        return decompressor
