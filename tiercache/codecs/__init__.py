"""Codecs: pages as fewer bytes. A new codec is one file and one row of the table."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tiercache.codecs.auto import AutoCodec
from tiercache.codecs.base import ByteArray, Codec
from tiercache.codecs.const import ConstCodec
from tiercache.codecs.exponent import ExponentCodec
from tiercache.codecs.quant import E4m3Codec, Int4Codec, Int8Codec
from tiercache.codecs.raw import RawCodec
from tiercache.codecs.tables import TableStore
from tiercache.codecs.window import WindowCodec
from tiercache.codecs.zstd import ZstdCodec
from tiercache.errors import ConfigError

__all__ = ["CODECS", "ByteArray", "Codec", "TableStore", "create_codec"]

CODECS: dict[str, Callable[..., Codec]] = {
    codec.name: codec
    for codec in (
        RawCodec,
        ConstCodec,
        WindowCodec,
        ExponentCodec,
        ZstdCodec,
        E4m3Codec,
        Int8Codec,
        Int4Codec,
        AutoCodec,
    )
}


def create_codec(name: str, **params: Any) -> Codec:
    """A codec by its name.

    Args:
        name: a key of `CODECS`.
        params: keyword arguments of that codec.

    Raises:
        ConfigError: the name or a parameter is unknown.
    """
    if name not in CODECS:
        raise ConfigError("unknown codec", got=repr(name), limit=f"one of {', '.join(CODECS)}")
    try:
        return CODECS[name](**params)
    except TypeError as error:
        raise ConfigError(f"codec {name!r} does not take these parameters", got=params) from error
