"""Content of a trace file, plain or compressed (gz, xz, zst)."""

from __future__ import annotations

import gzip
import lzma
import zlib
from pathlib import Path

from tiercache.policies.errors import TraceError

PACKED = (".gz", ".xz", ".zst")


def read_bytes(path: Path) -> bytes:
    """The file's content, unpacked. Raises TraceError when it is missing, damaged or cut off."""
    try:
        data = path.read_bytes()
    except FileNotFoundError as error:
        raise TraceError(f"{path}: no such trace") from error
    except OSError as error:
        raise TraceError(f"{path}: cannot be read", got=error.strerror) from error
    try:
        if path.suffix == ".gz":
            return gzip.decompress(data)
        if path.suffix == ".xz":
            return lzma.decompress(data)
        return _unpack_zst(data) if path.suffix == ".zst" else data
    except (EOFError, gzip.BadGzipFile, zlib.error, lzma.LZMAError) as error:
        raise TraceError(f"{path}: the compressed file is truncated or damaged", got=error) from error


def read_text(path: Path) -> str:
    """The file's content as text. Raises TraceError, with the line, when it is no UTF-8."""
    data = read_bytes(path)
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise TraceError(f"{path}: line {line} is no text", got=data[error.start : error.end]) from error


def _unpack_zst(data: bytes) -> bytes:
    import zstandard

    frames: list[bytes] = []
    while data or not frames:
        unpacker = zstandard.ZstdDecompressor().decompressobj()
        try:
            frames.append(unpacker.decompress(data))
        except zstandard.ZstdError as error:
            raise EOFError(str(error)) from error
        if not unpacker.eof:
            raise EOFError("the frame does not end")
        data = unpacker.unused_data
    return b"".join(frames)


def stem(path: Path) -> str:
    """The file's name without the suffix of a compression."""
    return path.name.removesuffix(path.suffix) if path.suffix in PACKED else path.name
