"""The codecs of one store: each is given what it takes of the store's options; and how fast a tier is."""

from __future__ import annotations

import inspect
import time
from collections.abc import Collection
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from tiercache.codecs import CODECS, create_codec
from tiercache.codecs.base import Codec
from tiercache.codecs.tables import TableStore
from tiercache.errors import ConfigError

if TYPE_CHECKING:
    from tiercache.tiers.base import Tier

_COPY_BYTES = 8 << 20


class CodecFactory:
    """Makes codecs.

    Args:
        instructions, threads: of native codecs.

    Attributes:
        tables: of the exponent codec; in memory until they are told where to be kept.
    """

    def __init__(self, *, instructions: str = "auto", threads: int = 1) -> None:
        self._native: dict[str, Any] = {"instructions": instructions, "threads": threads}
        self.tables = TableStore()

    def create(self, name: str) -> Codec:
        """A codec. Raises ConfigError as `create_codec` does."""
        options = {**self._native, "tables": self.tables}
        return create_codec(name, **{key: options[key] for key in options.keys() & taken_by(name)})

    def check_used(self, names: Collection[str]) -> None:
        """Raises ConfigError when an option of native codecs is set and none of these codecs takes it."""
        for option, default in (("instructions", "auto"), ("threads", 1)):
            got = self._native[option]
            if got != default and not any(option in taken_by(name) for name in names):
                raise ConfigError(
                    f"codec_{option}: has no effect on these codecs",
                    got=got,
                    limit=", ".join(sorted(names)),
                    remedy=f"name a native codec or leave codec_{option} out",
                )


def taken_by(name: str) -> Collection[str]:
    """Names of a codec's parameters. Raises ConfigError for an unknown codec."""
    if name not in CODECS:
        create_codec(name)
    return inspect.signature(CODECS[name]).parameters.keys()


def read_gbps(tier: Tier) -> float | None:
    """How fast a tier gives bytes back, in 1e9 bytes a second, as far as it was measured."""
    if tier.name != "disk":
        return copy_gbps()
    stats = getattr(tier, "stats", None)
    drives = stats()["drives"] if stats is not None else []
    return sum(drive["read_bytes_per_s"] for drive in drives) / 1e9 or None


@cache
def copy_gbps() -> float:
    """What one thread copies from memory to memory, in 1e9 bytes a second; measured once."""
    source, target = np.ones(_COPY_BYTES, np.uint8), np.empty(_COPY_BYTES, np.uint8)
    fastest_s = float("inf")
    for _ in range(4):  # the first one faults the pages in
        start_s = time.perf_counter()
        np.copyto(target, source)
        fastest_s = min(fastest_s, time.perf_counter() - start_s)
    return _COPY_BYTES / fastest_s / 1e9
