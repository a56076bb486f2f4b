"""Reading a store's disk tier while another process may write to it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tiercache import _core
from tiercache.errors import (
    ConfigError,
    PageCorruptError,
    PageMissingError,
    StoreClosedError,
    TierIOError,
)
from tiercache.tiers import disk_files
from tiercache.tiers.base import ByteArray, PageMeta
from tiercache.tiers.disk_index import DiskIndex, is_ours, is_sound
from tiercache.tiers.disk_index_files import index_to_read
from tiercache.tiers.disk_meta import RecordEntry, entry_of

_TRIES = 8  # of a look-up that meets a writer moving the record


@dataclass(frozen=True, slots=True)
class RecordLease:
    """A record that the writer won't reuse before the lease ends."""

    entry: RecordEntry
    reader: DiskReader

    def read(self, out: ByteArray | None = None) -> ByteArray:
        """The payload. Raises PageCorruptError with the reason."""
        if out is None:
            out = np.empty(self.entry.meta.stored_bytes, np.uint8)
        self.reader.core.read(self.entry.value, out)
        return out


class DiskReader:
    """Finds and reads persistent records of one store; any number of processes may.

    Args:
        directories: those of the writer, in its order.

    Raises:
        ConfigError: no store is there.
    """

    def __init__(self, directories: str | Path | Sequence[str | Path]) -> None:
        listed = [directories] if isinstance(directories, str | Path) else list(directories)
        self._roots = [Path(directory).absolute() for directory in listed]
        self.root = self._roots[0]
        for root in self._roots:
            if root.is_symlink():
                remedy = "name the directory itself"
                raise ConfigError(f"disk tier: {root} is a symlink; it was not followed", remedy=remedy)
        store = disk_files.read_store_file(self.root) if self.root.is_dir() else None
        if store is None:
            raise ConfigError(f"disk tier: no store in {self.root}", remedy="name the directory of a store")
        if store.drives != len(self._roots):
            raise ConfigError(
                f"disk tier: {self.root} has another number of directories",
                got=len(listed),
                limit=store.drives,
            )
        disk_files.check_drives(self._roots)
        self.store = store
        drives = [str(path / f"drive{number}") for number, path in enumerate(self._roots)]
        self.core = _core.Reader(drives, bytes.fromhex(store.uuid))
        self._index = self._open_index()
        self._closed = False
        self.damaged_entries = 0

    def _open_index(self) -> DiskIndex | None:
        """Opens it, again where a writer gave another one its place meanwhile."""
        for left in reversed(range(_TRIES)):
            self.index_path = index_to_read(self.root)
            before = _identity(self.index_path)
            try:
                found = self._try_index()
            except (PageCorruptError, TierIOError):
                if left == 0 or _identity(index_to_read(self.root)) == before:
                    raise
                continue
            if _identity(index_to_read(self.root)) == before:
                return found
            if found is not None:
                found.close()
        raise TierIOError(
            f"disk tier: the index in {self.root} is replaced again and again", remedy="try again"
        )

    def _try_index(self) -> DiskIndex | None:
        path = self.index_path
        if self.store.durability == "scratch" or not (path / "data.mdb").is_file():
            return None
        if not is_ours(path):
            raise PageCorruptError(f"disk tier: {path} holds other than plain files of this user's")
        if not is_sound(path, self.store.index_crc):
            remedy = "rebuild it: tiercache store rebuild"
            raise PageCorruptError(f"disk tier: the index {path} is damaged", remedy=remedy)
        return DiskIndex(path, 0, sync=False, readonly=True)

    def lookup(self, digest: bytes) -> PageMeta | None:
        """What the index says of this key."""
        value = self.value(digest)
        return None if value is None else entry_of(value).meta

    @contextmanager
    def lease(self, digest: bytes) -> Iterator[RecordLease]:
        """Holds the record of this key in place.

        Raises:
            PageMissingError: no such record, or it went while it was looked for.
        """
        for _ in range(_TRIES):
            value = self.value(digest)
            if value is None:
                break
            self.core.lease(value)
            try:
                if self.value(digest) == value:
                    yield RecordLease(entry_of(value), self)
                    return
            finally:
                self.core.release(value)
        raise PageMissingError(f"disk tier: no record of {digest.hex()[:12]} in {self.root}")

    def entries(self) -> Iterator[RecordEntry]:
        """All records of one snapshot of the index, in the order of their keys; entries that are none are left out,
        and counted in `damaged_entries`.
        """
        if self._closed:
            raise StoreClosedError("disk tier: reader used after close()")
        if self._index is None:
            return
        for _, value in self._index.entries():
            try:
                yield entry_of(value)
            except PageCorruptError:
                self.damaged_entries += 1

    def count(self) -> int:
        """Entries of the index, as of now."""
        return 0 if self._index is None else self._index.count()

    def value(self, digest: bytes) -> bytes | None:
        """The index's entry of this key, as of now."""
        if self._closed:
            raise StoreClosedError("disk tier: reader used after close()")
        return None if self._index is None else self._index.get(digest)

    def close(self) -> None:
        """Ends the index's environment. Leases end with it."""
        if self._closed:
            return
        self._closed = True
        if self._index is not None:
            self._index.close()


def _identity(path: Path) -> tuple[int, int] | None:
    """Of the folder that has this name now; None where nothing has."""
    try:
        status = path.lstat()
    except OSError:
        return None
    return status.st_dev, status.st_ino
