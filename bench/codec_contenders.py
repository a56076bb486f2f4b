"""Contenders of the codec benchmark: ours, and what else one would compress bf16 pages with.

Each packs a tensor into something and unpacks it back into bytes; memory that a library insists on making anew is
part of its time, ours writes into buffers as the store has them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from tiercache.codecs import create_codec
from tiercache.entry import PageKey


@dataclass(frozen=True)
class Contender:
    """`pack(tensor)` gives a payload and its size in bytes, `unpack(payload, tensor)` the page's bytes."""

    name: str
    pack: Callable[[torch.Tensor], tuple[Any, int]]
    unpack: Callable[[Any, torch.Tensor], Any]
    lossless: bool = True


def page_bytes(tensor: torch.Tensor) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """The tensor's bytes, not copied."""
    view: np.ndarray[Any, np.dtype[np.uint8]] = tensor.view(-1).view(torch.uint8).numpy()
    return view


def ours(name: str, **params: Any) -> Contender:
    """One of our codecs, with buffers that are kept."""
    codec = create_codec(name, **params)
    buffers: dict[tuple[int, ...], tuple[Any, torch.Tensor]] = {}
    places: dict[int, PageKey] = {}

    def buffer(tensor: torch.Tensor) -> tuple[Any, torch.Tensor]:
        shape = tuple(tensor.shape)
        if shape not in buffers:
            buffers.clear()
            room = np.zeros(codec.max_encoded_bytes(tensor.dtype, shape), np.uint8)
            buffers[shape] = (room, torch.zeros_like(tensor))
        return buffers[shape]

    def pack(tensor: torch.Tensor) -> tuple[Any, int]:
        room, _ = buffer(tensor)
        # Each tensor of the benchmark is a (layer, kind) of its own.
        key = places.setdefault(tensor.data_ptr(), PageKey(bytes(32), len(places), "page"))
        used = codec.encode(tensor, room, key)
        return room[:used], used

    def unpack(payload: Any, tensor: torch.Tensor) -> Any:
        _, out = buffer(tensor)
        codec.decode(payload, out)
        return page_bytes(out)

    return Contender(name, pack, unpack, codec.lossless)


def zstd_1() -> Contender:
    """The library zstd at level 1 on the raw bytes."""
    import zstandard

    compressor, decompressor = zstandard.ZstdCompressor(level=1), zstandard.ZstdDecompressor()

    def pack(tensor: torch.Tensor) -> tuple[Any, int]:
        frame = compressor.compress(page_bytes(tensor).data)
        return frame, len(frame)

    return Contender("zstd-1", pack, lambda frame, _: decompressor.decompress(frame))


def lz4() -> Contender:
    """lz4 on the raw bytes."""
    import lz4.block

    def pack(tensor: torch.Tensor) -> tuple[Any, int]:
        block = lz4.block.compress(page_bytes(tensor).data)
        return block, len(block)

    return Contender("lz4", pack, lambda block, _: lz4.block.decompress(block))


def zipnn() -> Contender:
    """ZipNN on bf16 bytes, one thread."""
    from zipnn import ZipNN

    zip_nn = ZipNN(input_format="byte", bytearray_dtype="bfloat16", threads=1)

    def pack(tensor: torch.Tensor) -> tuple[Any, int]:
        # It turns the bytes around in place, so it gets its own copy, at 10 GB/s a few percent of its time.
        payload = zip_nn.compress(bytearray(page_bytes(tensor).data))
        return payload, len(payload)

    return Contender("zipnn", pack, lambda payload, _: zip_nn.decompress(payload))


def blosc(name: str, codec: str, filter_name: str) -> Contender:
    """blosc2 with a shuffle of two-byte elements, one thread."""
    import blosc2

    params = {
        "codec": getattr(blosc2.Codec, codec),
        "filter": getattr(blosc2.Filter, filter_name),
        "clevel": 1,
        "typesize": 2,
    }
    blosc2.set_nthreads(1)

    def pack(tensor: torch.Tensor) -> tuple[Any, int]:
        payload = blosc2.compress(page_bytes(tensor).data, **params)
        return payload, len(payload)

    return Contender(name, pack, lambda payload, _: blosc2.decompress(payload))


def openzl() -> Contender:
    """OpenZL: bf16 taken apart, exponents by Huffman, the rest stored."""
    import openzl.ext as zl

    compressor = zl.Compressor()
    apart = zl.nodes.BFloat16Deconstruct()(compressor, zl.graphs.Store(), zl.graphs.Huffman())
    start = zl.nodes.ConvertSerialToNumLE16()(compressor, apart)
    compressor.select_starting_graph(start)
    encoder = zl.CCtx()
    decoder = zl.DCtx()

    def pack(tensor: torch.Tensor) -> tuple[Any, int]:
        encoder.ref_compressor(compressor)  # both end with each call
        encoder.set_parameter(zl.CParam.FormatVersion, zl.MAX_FORMAT_VERSION)
        payload = encoder.compress([zl.Input(zl.Type.Serial, page_bytes(tensor))])
        return payload, len(payload)

    def unpack(payload: Any, _tensor: torch.Tensor) -> Any:
        return np.asarray(decoder.decompress(payload)[0].content.as_nparray())

    return Contender("openzl", pack, unpack)


def contenders() -> tuple[list[Contender], dict[str, str]]:
    """All that work here, and of the others why they don't."""
    makers: dict[str, Callable[[], Contender]] = {
        "exponent": lambda: ours("exponent"),
        "window": lambda: ours("window"),
        "e4m3": lambda: ours("e4m3", axis="tokens"),
        "int8": lambda: ours("int8", axis="tokens"),
        "int4": lambda: ours("int4", axis="tokens"),
        "zipnn": zipnn,
        "blosc2-shuffle-zstd-1": lambda: blosc("blosc2-shuffle-zstd-1", "ZSTD", "SHUFFLE"),
        "blosc2-bitshuffle-lz4": lambda: blosc("blosc2-bitshuffle-lz4", "LZ4", "BITSHUFFLE"),
        "zstd-1": zstd_1,
        "lz4": lz4,
        "openzl": openzl,
    }
    working, missing = [], {}
    probe = torch.randn(4096, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16).view(64, 64)
    for name, make in makers.items():
        try:
            contender = make()
            payload, _ = contender.pack(probe)
            back = bytes(contender.unpack(payload, probe))
            if contender.lossless and back != page_bytes(probe).tobytes():
                missing[name] = "does not give the bytes back"
                continue
            working.append(contender)
        except ImportError as error:
            missing[name] = f"not installed: {error}"
        except Exception as error:  # a contender of another version must not end the run
            missing[name] = f"{type(error).__name__}: {error}"
    return working, missing
