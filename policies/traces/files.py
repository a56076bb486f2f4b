"""Bytes of a trace file, plain or compressed (gz, xz, zst)."""

from __future__ import annotations

import gzip
import lzma
from pathlib import Path

from tiercache.policies.errors import TraceError

PACKED = (".gz", ".xz", ".zst")


def read_bytes(path: Path) -> bytes:
    """The file's content, unpacked. Raises TraceError when it is missing, damaged or cut off."""
    try:
        if path.suffix == ".gz":
            return gzip.decompress(path.read_bytes())
        if path.suffix == ".xz":
            return _unpack_xz(path)
        if path.suffix == ".zst":
            return _unpack_zst(path)
        return path.read_bytes()
    except FileNotFoundError as error:
        raise TraceError(f"{path}: no such trace") from error
    except (EOFError, gzip.BadGzipFile, lzma.LZMAError) as error:
        raise TraceError(f"{path}: the compressed file is truncated or damaged", got=error) from error


def _unpack_xz(path: Path) -> bytes:
    unpacker = lzma.LZMADecompressor()
    data = unpacker.decompress(path.read_bytes())
    if not unpacker.eof:
        raise EOFError("the stream does not end")
    return data


def _unpack_zst(path: Path) -> bytes:
    import zstandard

    unpacker = zstandard.ZstdDecompressor().decompressobj()
    try:
        data = unpacker.decompress(path.read_bytes())
    except zstandard.ZstdError as error:
        raise EOFError(str(error)) from error
    if not unpacker.eof:
        raise EOFError("the frame does not end")
    return data


def stem(path: Path) -> str:
    """The file's name without the suffix of a compression."""
    return path.name.removesuffix(path.suffix) if path.suffix in PACKED else path.name
