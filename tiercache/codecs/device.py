"""The codecs on the device: window, e4m3, int8 and int4 as CUDA kernels, on the caller's stream.

Payloads are those of the host codecs, bit for bit, so either side reads what the other wrote.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from tiercache.codecs.quant import AXES, ELEMENTS, HEAD_BYTES, page_shape, refuse_gradients
from tiercache.codecs.views import num_tensor_bytes
from tiercache.entry import PageKey
from tiercache.errors import CodecError, ConfigError

DeviceFormat = Literal["window", "e4m3", "int8", "int4"]
ELEMENT_NAMES = {torch.bfloat16: "bf16", torch.float16: "half", torch.float32: "single"}
WINDOW_HEAD_BYTES = 1
_THREADS = 128
_SUPER = 64  # groups a count
_GROUP = 64  # elements a group


def kernel_source() -> tuple[str, Path]:
    """The kernels' source and the folder of its headers, which the package carries."""
    folder = Path(__file__).parent.parent / "csrc"
    return (folder / "codec_kernels.cu").read_text(), folder


@lru_cache(maxsize=8)
def _module(device: int) -> Any:
    """The kernels compiled for one device, once."""
    if importlib.util.find_spec("cupy") is None:
        raise ConfigError("device codecs need cupy", remedy="pip install 'tiercache[cuda]'")
    import cupy

    source, folder = kernel_source()
    with cupy.cuda.Device(device):
        options = ("-std=c++17", "-fmad=false", f"-I{folder}")
        return cupy.RawModule(code=source, options=options, backend="nvrtc")


class DeviceCodec:
    """Encodes and decodes CUDA tensors where they are. Nothing here waits for the device.

    Lengths are int64 tensors of one element on the device: read them when you must, after your own event. A
    length above the payload's room means that the page does not fit, and is to be stored raw.

    Args:
        format: "window" (bf16 only, lossless) or a lossy one (bf16, fp16, fp32).
        axis: "tokens" or "channels", along what groups of a lossy format run.

    Raises:
        ConfigError: the format or axis is unknown, or cupy is missing (at the first use).
    """

    def __init__(self, format: DeviceFormat, *, axis: str = "channels") -> None:  # noqa: A002 - the word of DESIGN
        if format not in ("window", "e4m3", "int8", "int4"):
            raise ConfigError("device codec", got=repr(format), limit="window, e4m3, int8 or int4")
        if axis not in AXES:
            raise ConfigError("axis of a device codec", got=repr(axis), limit="tokens or channels")
        self.format = format
        self.axis = axis

    def room_bytes(self, tensor: torch.Tensor) -> int:
        """Bytes of a payload tensor: enough for any page that gets smaller, and for the fixed parts."""
        raw = num_tensor_bytes(tensor.dtype, tuple(tensor.shape))
        return max(raw, self._fixed_bytes(tensor)) + HEAD_BYTES

    def encode(
        self,
        tensor: torch.Tensor,
        out: torch.Tensor,
        length: torch.Tensor,
        *,
        key: PageKey | None = None,
        seed: int = 0,
    ) -> None:
        """Writes the payload into `out` and its size in bytes into `length`, on the current stream.

        Args:
            tensor: contiguous CUDA tensor; not modified.
            out: uint8 CUDA tensor of `room_bytes(tensor)`.
            length: int64 CUDA tensor of one element.
            key: what the page holds; gradient pages refuse lossy formats.
            seed: of int4's random numbers; what `Int4Codec.seed_of(key)` gives makes the host's bits.

        Raises:
            CodecError: a tensor is on the wrong device, not contiguous, of a wrong dtype or too small.
        """
        self._check(tensor, out, length)
        if self.format == "window":
            self._encode_window(tensor, out, length)
            return
        refuse_gradients(self.format, key)
        self._encode_quant(tensor, out, length, seed)

    def decode(
        self, payload: torch.Tensor, length: torch.Tensor, out: torch.Tensor, bad: torch.Tensor
    ) -> None:
        """Fills `out` from the payload on the current stream; sets `bad` (int32, one element) if it can't.

        Nothing outside the payload's first `length` bytes is read.

        Raises:
            CodecError: as encode does.
        """
        self._check(out, payload, length)
        if bad.dtype != torch.int32 or bad.device != out.device:
            raise CodecError(
                "bad must be int32 on the device of the page", got=f"{bad.dtype} on {bad.device}"
            )
        if self.format == "window":
            threads = max(out.numel() // _GROUP, 1)
            body = payload.data_ptr() + WINDOW_HEAD_BYTES
            room = payload.numel() - WINDOW_HEAD_BYTES
            arguments = [body, room, length - WINDOW_HEAD_BYTES, out.numel(), out, bad]
            self._launch("window_decode_groups", threads, out, arguments)
            return
        shape = self._shape(out)
        name = f"{self.format}_{ELEMENT_NAMES[out.dtype]}_decode_groups"
        body, room = payload.data_ptr() + HEAD_BYTES, payload.numel() - HEAD_BYTES
        arguments = [body, room, length - HEAD_BYTES, *shape, out, bad]
        self._launch(name, max(self._groups(out), 1), out, arguments)

    def _encode_window(self, tensor: torch.Tensor, out: torch.Tensor, length: torch.Tensor) -> None:
        groups, tail = divmod(tensor.numel(), _GROUP)
        supers = -(-groups // _SUPER)
        body = out.data_ptr() + WINDOW_HEAD_BYTES
        room = out.numel() - WINDOW_HEAD_BYTES
        fixed = 89 * groups + 4 * supers + 2 * tail
        first_escape = body + 89 * groups
        self._launch(
            "write_head", WINDOW_HEAD_BYTES, tensor, [out, np.uint32(1), np.uint32(WINDOW_HEAD_BYTES)]
        )
        if groups:
            self._launch("window_encode_groups", groups, tensor, [tensor, groups, body])
            self._launch("window_count_escapes", supers, tensor, [body, groups])
        self._scan(tensor, first_escape, supers, fixed, 1, length)
        arguments = [tensor, tensor.numel(), body, room, length]
        self._launch("window_write_escapes", max(groups, 1), tensor, arguments)
        length += WINDOW_HEAD_BYTES

    def _encode_quant(self, tensor: torch.Tensor, out: torch.Tensor, length: torch.Tensor, seed: int) -> None:
        shape = self._shape(tensor)
        groups = self._groups(tensor)
        supers = -(-groups // _SUPER)
        prefix = f"{self.format}_{ELEMENT_NAMES[tensor.dtype]}"
        counts = torch.empty(max(4 * supers, 4), dtype=torch.uint8, device=tensor.device)
        body = out.data_ptr() + HEAD_BYTES
        head = np.uint32(1 | AXES[self.axis] << 8)
        self._launch("write_head", HEAD_BYTES, tensor, [out, head, np.uint32(HEAD_BYTES)])
        if groups:
            self._launch(f"{prefix}_encode_groups", groups, tensor, [tensor, *shape, np.uint64(seed), body])
            scale = np.uint32(4 if self.format == "int4" else 2)
            self._launch("quant_count_exceptions", supers, tensor, [body, scale, groups, counts])
        unit = 4 + _GROUP * tensor.dtype.itemsize
        self._scan(tensor, counts.data_ptr(), supers, self._fixed_bytes(tensor), unit, length)
        room = out.numel() - HEAD_BYTES
        arguments = [tensor, *shape, body, room, length, counts]
        self._launch(f"{prefix}_write_exceptions", max(groups, 1), tensor, arguments)
        length += HEAD_BYTES

    def _scan(
        self, tensor: torch.Tensor, counts: int, number: int, fixed: int, unit: int, length: torch.Tensor
    ) -> None:
        self._launch("scan_counts", 1024, tensor, [counts, number, fixed, unit, length], block=1024)

    def _shape(self, tensor: torch.Tensor) -> list[Any]:
        outer, tokens, channels, axis = page_shape(tuple(tensor.shape), AXES[self.axis])
        return [outer, tokens, channels, np.uint32(axis)]

    def _groups(self, tensor: torch.Tensor) -> int:
        outer, tokens, channels, axis = page_shape(tuple(tensor.shape), AXES[self.axis])
        along, across = (tokens, channels) if axis else (channels, tokens)
        return outer * -(-along // _GROUP) * across

    def _fixed_bytes(self, tensor: torch.Tensor) -> int:
        """Bytes of a body without exceptions or escapes."""
        if self.format == "window":
            groups, tail = divmod(tensor.numel(), _GROUP)
            return 89 * groups + 4 * -(-groups // _SUPER) + 2 * tail
        outer, tokens, channels, axis = page_shape(tuple(tensor.shape), AXES[self.axis])
        if self.format != "int4":
            return 2 * self._groups(tensor) + tensor.numel()
        pairs = -(-tokens // 2) * channels if axis else tokens * -(-channels // 2)
        return 4 * self._groups(tensor) + outer * pairs

    def _check(self, page: torch.Tensor, payload: torch.Tensor, length: torch.Tensor) -> None:
        allowed = [torch.bfloat16] if self.format == "window" else list(ELEMENTS)
        if page.device.type != "cuda" or not page.is_contiguous() or page.dtype not in allowed:
            raise CodecError(
                f"device {self.format} takes contiguous CUDA tensors of {allowed}",
                got=f"{page.dtype} on {page.device}, strides {page.stride()}",
            )
        if payload.device != page.device or payload.dtype != torch.uint8 or not payload.is_contiguous():
            raise CodecError("payload must be contiguous uint8 on the device of the page", got=payload.device)
        if payload.numel() < self._fixed_bytes(page) + HEAD_BYTES:
            raise CodecError(
                "payload is too small", got=payload.numel(), limit=self._fixed_bytes(page) + HEAD_BYTES
            )
        if length.device != page.device or length.dtype != torch.int64 or length.numel() != 1:
            raise CodecError("length must be one int64 on the device of the page", got=length.dtype)

    def _launch(
        self,
        name: str,
        threads: int,
        tensor: torch.Tensor,
        arguments: Sequence[Any],
        *,
        block: int = _THREADS,
    ) -> None:
        """Starts a kernel on torch's current stream. Integers are passed as 64 bits, tensors by address."""
        import cupy

        device = tensor.device.index
        kernel = _module(device).get_function(name)
        stream = torch.cuda.current_stream(tensor.device)
        packed = [_argument(argument) for argument in arguments]
        with cupy.cuda.Device(device), cupy.cuda.ExternalStream(stream.cuda_stream, device):
            kernel((-(-threads // block),), (block,), tuple(packed))


def _argument(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return np.uint64(value.data_ptr())
    return np.uint64(value) if isinstance(value, int) else value
