"""The window codec: 11 bits a bf16 element and escapes. For device to host, and a host tier read often."""

from __future__ import annotations

import numpy as np
import torch

from tiercache import _core
from tiercache.codecs.base import ByteArray, Codec
from tiercache.codecs.const import plane_width
from tiercache.codecs.dispatch import check_threads, resolve_instructions
from tiercache.codecs.views import contiguous_bytes, num_tensor_bytes, require_room, writable_bytes
from tiercache.entry import PageKey
from tiercache.errors import CodecError

_PLANES, _WINDOW = 0, 1


class WindowCodec(Codec):
    """Sign and mantissa as a byte, the exponent as three bits above its group's base, or an escaped byte.

    The first byte says window or constant planes: other dtypes, and pages that the window would not make
    smaller, are stored as the const codec stores them.

    Args:
        instructions: "auto", "avx512", "avx2" or "portable"; the payload does not depend on it.
        threads: how many work on one page.

    Raises:
        ConfigError: the processor cannot run these instructions, or `threads` is below 1.
    """

    name = "window"

    def __init__(self, *, instructions: str = "auto", threads: int = 1) -> None:
        self._isa = resolve_instructions(instructions)
        self._threads = check_threads(threads)

    def max_encoded_bytes(self, dtype: torch.dtype, shape: tuple[int, ...]) -> int:
        """The tensor's bytes and two."""
        return num_tensor_bytes(dtype, shape) + 2

    def encode(self, tensor: torch.Tensor, out: ByteArray, key: PageKey | None = None) -> int:
        """Encodes into `out`; returns the payload's size in bytes."""
        data = contiguous_bytes(tensor)
        require_room(self.name, out, data.size + 2)
        if tensor.dtype == torch.bfloat16 and _core.constant_planes(data, 2) == 0:
            used = _core.window_encode(data.view(np.uint16), out[1 : data.size + 1], self._isa, self._threads)
            if 0 < used < data.size:
                out[0] = _WINDOW
                return int(used) + 1
        out[0] = _PLANES
        return int(_core.planes_encode(data, plane_width(tensor.dtype), out[1:])) + 1

    def decode(self, payload: ByteArray, out: torch.Tensor) -> None:
        """Fills `out`. Raises CodecError when the payload is malformed or not of its size."""
        target = writable_bytes(out)
        if payload.size == 0 or payload[0] > _WINDOW:
            raise CodecError("window payload has no valid first byte", got=f"{payload.size} bytes")
        if payload[0] == _PLANES:
            _core.planes_decode(payload[1:], plane_width(out.dtype), target)
            return
        if out.dtype != torch.bfloat16:
            raise CodecError("window payload of another dtype", got=out.dtype, limit="bfloat16")
        _core.window_decode(payload[1:], target.view(np.uint16), self._isa, self._threads)
