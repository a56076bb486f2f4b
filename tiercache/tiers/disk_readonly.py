"""What stands in for the core where the directory cannot be written."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tiercache.errors import TierFullError
from tiercache.tiers.base import ByteArray, PageMeta
from tiercache.tiers.disk_meta import entry_of
from tiercache.tiers.disk_reader import DiskReader


class ReadOnlyCore:
    """Reads persistent records of a store on a read-only file system; has room for nothing else.

    Attributes:
        used_bytes: payloads of the records that are claimed.
    """

    spare_bytes = 0

    def __init__(self, directories: list[Path]) -> None:
        self._reader = DiskReader(directories)
        self.used_bytes = 0
        self.next_sequence = self._reader.store.next_sequence

    def reserve(self, num_bytes: int) -> int:
        """There is never room."""
        remedy = "name a directory that can be written"
        what = f"disk tier: reserve of {num_bytes} bytes in {self._reader.root}, which is read-only"
        raise TierFullError(what, got="0 bytes free", limit=0, remedy=remedy)

    def make_room(self, num_bytes: int, wait_s: float) -> bool:
        """There is none to be had."""
        del num_bytes, wait_s
        return False

    def lookup(self, digests: Sequence[bytes]) -> list[tuple[bytes, tuple[Any, ...]] | None]:
        """The entry of a key stands for its slot."""
        return [self._lookup(digest) for digest in digests]

    def _lookup(self, digest: bytes) -> tuple[bytes, tuple[Any, ...]] | None:
        value = self._reader.value(digest)
        if value is None:
            return None
        meta = entry_of(value).meta
        self.used_bytes += meta.stored_bytes
        key = None if meta.key is None else (meta.key.node, meta.key.layer, meta.key.kind, meta.key.graph)
        plain = (
            meta.digest,
            meta.namespace,
            meta.dtype,
            meta.shape,
            meta.codec,
            meta.raw_bytes,
            meta.stored_bytes,
        )
        return value, (*plain, key, meta.persistent)

    def read(self, slot: bytes, out: ByteArray, meta: PageMeta) -> None:
        """Fills `out` from a record."""
        del meta  # the entry proves the record
        self._reader.core.read(slot, out)

    def let_go(self, slot: bytes) -> None:
        """Ends a claim."""
        self.used_bytes -= entry_of(slot).meta.stored_bytes

    free = let_go

    def remove(self, digest: bytes) -> bool:
        """Nothing can be removed."""
        del digest
        return False

    def flush(self, timeout_s: float) -> bool:
        """Nothing is pending."""
        del timeout_s
        return True

    def journal_hits(self) -> None:
        """Hits are not counted."""

    def stats(self) -> dict[str, Any]:
        """The rung says it all."""
        return {"drives": [{"rung": "read-only"}], "used_bytes": 0, "misses": {}}

    def check_integrity(self) -> None:
        """There are no books."""

    def close(self, timeout_s: float) -> bool:
        """Ends the reader."""
        del timeout_s
        self._reader.close()
        return True
