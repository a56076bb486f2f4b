"""Byte views of tensors: what every codec does before and after its own work."""

from __future__ import annotations

import numpy as np
import torch

from tiercache.codecs.base import ByteArray
from tiercache.errors import CodecError


def num_tensor_bytes(dtype: torch.dtype, shape: tuple[int, ...]) -> int:
    """Bytes of a dense tensor of that dtype and shape."""
    count = 1
    for size in shape:
        count *= size
    return count * dtype.itemsize


def contiguous_bytes(tensor: torch.Tensor) -> ByteArray:
    """The tensor's elements in C order as bytes; a view where it is dense already, else a copy.

    Args:
        tensor: any dtype, shape and strides, on the CPU; not modified.

    Raises:
        CodecError: the tensor is not a strided CPU tensor.
    """
    if tensor.device.type != "cpu" or tensor.layout != torch.strided:
        raise CodecError(
            "encode takes strided CPU tensors",
            got=f"{tensor.layout} on {tensor.device}",
            remedy="copy the tensor to the CPU first",
        )
    dense = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    view: ByteArray = dense.view(torch.uint8).numpy()
    return view


def writable_bytes(out: torch.Tensor) -> ByteArray:
    """The bytes of `out`, a contiguous CPU tensor, to be written in place.

    Raises:
        CodecError: `out` is not a contiguous CPU tensor.
    """
    if out.device.type != "cpu" or not out.is_contiguous():
        raise CodecError(
            "decode fills contiguous CPU tensors",
            got=f"strides {out.stride()} on {out.device}",
            remedy="decode into a fresh tensor and copy",
        )
    view: ByteArray = out.detach().view(-1).view(torch.uint8).numpy()
    return view


def require_room(codec: str, out: ByteArray, need_bytes: int) -> None:
    """Checks that `out` can take a payload of `need_bytes`.

    Raises:
        CodecError: `out` is too small, read-only, or not one-dimensional contiguous bytes.
    """
    if out.dtype != np.uint8 or out.ndim != 1 or not out.flags.c_contiguous or not out.flags.writeable:
        raise CodecError(f"{codec} encodes into writable one-dimensional contiguous bytes", got=out.dtype)
    if out.size < need_bytes:
        raise CodecError(
            f"{codec} needs a larger output buffer",
            got=f"{out.size} bytes",
            limit=f"{need_bytes} bytes",
            remedy="size it by max_encoded_bytes",
        )
