"""The lossy codecs e4m3, int8 and int4: opt-in, honest about what they keep exact, refused for gradients."""

from __future__ import annotations

import logging
import math
import threading
from typing import Literal

import torch

from tiercache import _core
from tiercache.codecs.base import ByteArray, Codec
from tiercache.codecs.const import plane_width
from tiercache.codecs.dispatch import check_threads, resolve_instructions
from tiercache.codecs.views import contiguous_bytes, num_tensor_bytes, require_room, writable_bytes
from tiercache.entry import PageKey
from tiercache.errors import CodecError, ConfigError

log = logging.getLogger(__name__)

Axis = Literal["auto", "tokens", "channels"]

_PLANES, _QUANT = 0, 1
HEAD_BYTES = 2
ELEMENTS = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}
AXES = {"channels": 0, "tokens": 1}
# Outliers of keys, queries and the residual stream stay in their channels, so a scale runs along tokens there.
_TOKEN_KINDS = ("key", "query", "layer_input")


def page_shape(shape: tuple[int, ...], axis: int) -> tuple[int, int, int, int]:
    """(outer, tokens, channels, axis) of a page: its last two dimensions are tokens and channels."""
    channels = shape[-1] if shape else 1
    tokens = shape[-2] if len(shape) > 1 else 1
    return math.prod(shape[:-2]), tokens, channels, axis


class QuantCodec(Codec):
    """Up to 64 elements share a bf16 scale; groups with values that are not finite are kept as they are.

    The first byte says lossy or constant planes (dtypes other than bf16, fp16 and fp32 are kept exact), the
    second the axis of the groups; then the body of `codec_quant.hpp`. Encoding fixes the values: decoding
    gives the same bits each time, so capture, replay and pop see one page.

    Args:
        axis: along what a group runs; "auto" takes "tokens" for keys, queries and layer inputs, else
            "channels".
        seed: mixed into the random numbers of int4, which are otherwise a function of the page's key, so of
            the weights' version, and of the element's index.
        instructions: "auto", "avx512", "avx2" or "portable"; the payload does not depend on it.
        threads: how many work on one page; the payload does not depend on it.

    Attributes:
        exact_groups: groups kept as they are so far, for values not finite or out of a scale's range.

    Raises:
        ConfigError: an argument is unknown or the processor cannot run these instructions.
    """

    lossless = False
    format: int

    def __init__(
        self, *, axis: Axis = "auto", seed: int = 0, instructions: str = "auto", threads: int = 1
    ) -> None:
        if axis != "auto" and axis not in AXES:
            raise ConfigError("axis of a lossy codec", got=repr(axis), limit="auto, tokens or channels")
        self._axis = axis
        self._seed = seed
        self._isa = resolve_instructions(instructions)
        self._threads = check_threads(threads)
        self._lock = threading.Lock()
        self.exact_groups = 0

    def max_encoded_bytes(self, dtype: torch.dtype, shape: tuple[int, ...]) -> int:
        """The tensor's bytes and three."""
        return num_tensor_bytes(dtype, shape) + HEAD_BYTES + 1

    def encode(self, tensor: torch.Tensor, out: ByteArray, key: PageKey | None = None) -> int:
        """Encodes into `out`; returns the payload's size in bytes.

        Raises:
            CodecError: the key is a gradient page's.
        """
        refuse_gradients(self.name, key)
        data = contiguous_bytes(tensor)
        require_room(self.name, out, data.size + HEAD_BYTES + 1)
        axis = self.axis_of(key)
        out[0], out[1] = _QUANT, axis
        used, exact = 0, 0
        if tensor.dtype in ELEMENTS and data.size:
            shape, kind = page_shape(tuple(tensor.shape), axis), (self.format, ELEMENTS[tensor.dtype])
            body = out[HEAD_BYTES : data.size + HEAD_BYTES]
            used, exact = _core.quant_encode(
                data, shape, kind, self.seed_of(key), body, self._isa, self._threads
            )
        if exact:
            self._report(exact, key)
        if used:
            return int(used) + HEAD_BYTES
        out[0] = _PLANES
        planes = _core.planes_encode(data, plane_width(tensor.dtype), out[HEAD_BYTES:])
        return int(planes) + HEAD_BYTES

    def decode(self, payload: ByteArray, out: torch.Tensor) -> None:
        """Fills `out`. Raises CodecError when the payload is malformed or not of its size."""
        target = writable_bytes(out)
        if payload.size < HEAD_BYTES or payload[0] > _QUANT or payload[1] > 1:
            raise CodecError(f"{self.name} payload has no valid head", got=f"{payload.size} bytes")
        body = payload[HEAD_BYTES:]
        if payload[0] == _PLANES:
            _core.planes_decode(body, plane_width(out.dtype), target)
            return
        if out.dtype not in ELEMENTS:
            raise CodecError(f"{self.name} payload of another dtype", got=out.dtype)
        kind = (self.format, ELEMENTS[out.dtype])
        shape = page_shape(tuple(out.shape), int(payload[1]))
        _core.quant_decode(body, shape, kind, target, self._isa, self._threads)

    def axis_of(self, key: PageKey | None) -> int:
        """Number of the axis along which this page's groups run."""
        if self._axis != "auto":
            return AXES[self._axis]
        return AXES["tokens" if key is not None and key.kind in _TOKEN_KINDS else "channels"]

    def seed_of(self, key: PageKey | None) -> int:
        """Seed of this page's random numbers."""
        identity = 0 if key is None else int.from_bytes(key.digest[:8], "little")
        return (identity ^ self._seed * 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF

    def _report(self, exact: int, key: PageKey | None) -> None:
        with self._lock:
            first = self.exact_groups == 0
            self.exact_groups += exact
        if first:
            log.warning(
                "%s keeps %d groups of page %s exact: they hold values that are not finite or cannot be scaled; "
                "later ones are only counted",
                self.name,
                exact,
                key,
            )


def refuse_gradients(codec: str, key: PageKey | None) -> None:
    """Raises CodecError when a lossy codec is asked to encode a gradient page."""
    if key is not None and key.kind.startswith("grad_"):
        raise CodecError(
            f"{codec} is lossy and gradient pages are sums that must stay exact",
            got=str(key),
            remedy="use a lossless codec for gradient pages",
        )


class E4m3Codec(QuantCodec):
    """8-bit floats with 4 bits of exponent: about 2 to 3 % error an element, 1.94 times smaller."""

    name = "e4m3"
    format = 0


class Int8Codec(QuantCodec):
    """8-bit integers by steps that are powers of two, rounded to nearest: half a step wrong, 1.94 times smaller."""

    name = "int8"
    format = 1


class Int4Codec(QuantCodec):
    """4-bit integers above the group's lowest value, rounded at random so that the error has no bias."""

    name = "int4"
    format = 2
    stable = False
