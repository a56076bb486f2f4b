"""The disk tier: the native core, and the index that lets a later process find its records."""

from __future__ import annotations

import errno
import logging
import os
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tiercache import _core
from tiercache.errors import (
    ConfigError,
    PageStateError,
    StoreClosedError,
    StoreTimeoutError,
    TierCacheError,
    TierIOError,
)
from tiercache.folders import make_directory
from tiercache.tiers import disk_files, disk_recovery
from tiercache.tiers.base import ByteArray, PageMeta, Slot, Tier
from tiercache.tiers.disk_index import DiskIndex, index_crc
from tiercache.tiers.disk_journal import IndexWriter
from tiercache.tiers.disk_meta import slot_and_meta
from tiercache.tiers.disk_options import DiskOptions
from tiercache.tiers.disk_readonly import ReadOnlyCore

_log = logging.getLogger(__name__)


class DiskTier(Tier):
    """Pages as records in preallocated segment files.

    `reserve`, `write`, `read` and `free` are the contract of every tier. A record written with `meta.persistent` is
    found by `lookup`, and with durability "process" or "power" also by a later process. `free` and `remove` delete
    such a record; `let_go` keeps it. Records of earlier processes and those let go give way when room is needed: the
    longest unclaimed first.

    Args:
        directories: one or several, each a drive of its own; made with mode 0700 when missing.
        capacity_bytes: budget of all segment files together, their headers included. The index comes on top: about
            1 KiB a persistent record.
        options: fields of DiskOptions.

    Raises:
        ConfigError: an argument that cannot be meant, or a directory that holds pages of another durability.
        StoreLockedError: another process writes here; with its pid.
        PageCorruptError: a file that is not the store's lies among its own.
        TierIOError: the operating system refused.
    """

    name = "disk"

    def __init__(
        self,
        directories: str | Path | Sequence[str | Path],
        capacity_bytes: int,
        **options: Any,
    ) -> None:
        self.options = DiskOptions(**options)
        listed = [directories] if isinstance(directories, str | Path) else list(directories)
        if not listed:
            raise ConfigError("disk tier: directories", got="none", limit="at least one")
        self.directories = [Path(directory).absolute() for directory in listed]
        self.durability = self.options.durability
        self.keeps_records = self.durability != "scratch"
        self._root = self.directories[0]
        self._timeout_s = self.options.timeout_s
        self._owner = os.getpid()
        self._closed = False
        self._index: DiskIndex | None = None
        self._writer: IndexWriter | None = None
        self.refused_files: list[str] = []
        self.rebuilt: tuple[int, int, list[str]] = (0, 0, [])
        self.read_only = False
        self.core: Any = None
        try:
            for directory in self.directories:
                make_directory(directory)
            self._lock: _core.WriterLock | None = _core.WriterLock(str(self._root))
            self._was, self._store = disk_files.next_epoch(self.directories, self.durability)
        except TierIOError as error:
            if error.errno not in (errno.EROFS, errno.EACCES, errno.EPERM):
                raise
            self._open_read_only(error)
            self._finalizer = weakref.finalize(
                self, disk_recovery.end_forgotten, self.core, self._writer, self._timeout_s, self._owner
            )
            return
        except BaseException:
            self._abandon()
            raise
        try:
            self.core = _core.Disk(
                directories=[str(path / f"drive{number}") for number, path in enumerate(self.directories)],
                capacity_bytes=capacity_bytes,
                uuid=bytes.fromhex(self._store.uuid),
                epoch=self._store.epoch,
                next_sequence=self._store.next_sequence,
                **self.options.for_core(),
            )
            self._capacity_bytes = self.core.capacity_bytes
            self.refused_files = self.core.open_existing(self.durability != "scratch")
            if self.durability != "scratch":
                self._open_index(capacity_bytes)
            self._say_once()
        except BaseException:
            self._abandon()
            raise
        self._finalizer = weakref.finalize(
            self, disk_recovery.end_forgotten, self.core, self._writer, self._timeout_s, self._owner
        )

    # ---- opening ----

    def _abandon(self) -> None:
        # A traceback may keep this object alive; the directory must not stay locked with it.
        self._lock = None
        if self.core is not None:
            self.core.close(self._timeout_s)
        if self._writer is not None:
            self._writer.join(self._timeout_s)
        if self._index is not None:
            self._index.close()

    def _open_read_only(self, error: TierIOError) -> None:
        if not (self._root / "STORE").exists():
            raise error
        self.read_only = True
        self._lock = None
        self.core = ReadOnlyCore(self.directories)
        self._capacity_bytes = 0
        _log.warning("disk tier: %s is read-only: pages are read from it and none are written", self._root)

    def _open_index(self, capacity_bytes: int) -> None:
        anew, crc = self.options.rebuild is not None, self._was.index_crc
        path, fresh = disk_recovery.open_path(self._root, crc, anew=anew)
        self._index = DiskIndex(path, capacity_bytes, sync=self.durability == "power")
        entries = self._index.entries()
        if refused := [
            digest for digest, value in entries if not disk_recovery.adopt(self.core, digest, value)
        ]:
            self._index.delete(refused)
        self._writer = IndexWriter(self.core, self._index, logged=self.options.log)
        if fresh and self._was.epoch > 0 and self._was.durability != "scratch":
            if not anew:
                what = "disk tier: the index of %s is gone or damaged; rebuilding it from the segments"
                _log.warning(what, self._root)
            self.rebuilt = disk_recovery.rebuild(self.core, self.options.rebuild)
        self._finish_index()

    def _finish_index(self) -> None:
        if self._index is not None and self._writer is not None:
            parts, sync = (self.core, self._writer, self._index, self._root), self.durability == "power"
            disk_recovery.finish_index(*parts, self._timeout_s, sync=sync)

    def _say_once(self) -> None:
        for line in self.refused_files:
            _log.warning("disk tier: not used: %s", line)
        for number, rung in enumerate(drive["rung"] for drive in self.core.stats()["drives"]):
            _log.info("disk tier: drive %d of %s: %s", number, self._root, rung)

    def trim(self) -> int:
        """Removes segment files without records, and the files that were refused at open. Returns bytes freed."""
        return int(self.core.trim(True))  # noqa: FBT003 - refused files too

    # ---- the contract ----

    @property
    def capacity_bytes(self) -> int:
        """Budget of the segment files; of a read-only store, what is claimed of it."""
        return self.used_bytes if self.read_only else int(self._capacity_bytes)

    @property
    def used_bytes(self) -> int:
        """Bytes of all slots, record headers and padding included."""
        return 0 if self._closed else int(self.core.used_bytes)

    @property
    def spare_bytes(self) -> int:
        """Of them, records that nobody claims."""
        return 0 if self._closed else int(self.core.spare_bytes)

    def reserve(self, num_bytes: int) -> Slot:
        """Room for `num_bytes`. Raises TierFullError with need, have and remedy."""
        if num_bytes < 1:
            raise ConfigError("disk tier: reserve", got=num_bytes, limit="1 byte or more")
        return Slot(self.core.reserve(num_bytes), num_bytes)

    def make_room(self, num_bytes: int, timeout_s: float) -> bool:
        """Waits for deletions to be committed, lets unclaimed records give way; False when that gives no room."""
        return bool(self.core.make_room(num_bytes, timeout_s))

    def write(self, slot: Slot, data: ByteArray, meta: PageMeta) -> None:
        """Writes the record; it is readable when this returns."""
        if data.size != meta.stored_bytes:
            raise PageStateError("disk tier: write of another size", got=data.size, limit=meta.stored_bytes)
        self.core.write(slot.handle, data, meta)

    def read(self, slot: Slot, out: ByteArray, meta: PageMeta) -> None:
        """Fills `out`. Raises PageCorruptError with the reason; the record then stays out of use."""
        if out.size != meta.stored_bytes:
            raise PageStateError("disk tier: read of another size", got=out.size, limit=meta.stored_bytes)
        self.core.read(slot.handle, out, meta)

    def free(self, slot: Slot) -> None:
        """Ends a slot and deletes its record. After close() this does nothing."""
        try:
            self.core.free(slot.handle)
        except StoreClosedError:
            return

    def let_go(self, slot: Slot) -> None:
        """Ends a slot or the claim of a look-up; a persistent record stays. After close() this does nothing."""
        try:
            self.core.let_go(slot.handle)
        except StoreClosedError:
            return

    def lookup(self, digest: bytes) -> tuple[Slot, PageMeta] | None:
        """The persistent record of this key, written by this process or an earlier one; claimed until let go."""
        return (found := self.core.lookup((digest,))[0]) and slot_and_meta(*found)

    def lookup_many(self, digests: Sequence[bytes]) -> list[tuple[Slot, PageMeta] | None]:
        """The same for many keys at once."""
        return [found and slot_and_meta(*found) for found in self.core.lookup(digests)]

    def remove(self, digest: bytes) -> bool:
        """Deletes the persistent record of this key. False when there is none."""
        return bool(self.core.remove(digest))

    def flush(self, timeout_s: float | None = None) -> None:
        """Returns once every record and deletion so far is as durable as `durability` promises.

        Raises:
            TierIOError: the index could not be written since the last flush: a later process will not find some of the
                records.
            StoreTimeoutError: the deadline passed.
        """
        limit_s = self._timeout_s if timeout_s is None else timeout_s
        done = self.core.flush(limit_s)
        failure = None if self._writer is None else self._writer.take_failure(now=not done)
        if failure is not None:
            raise TierIOError("disk tier: flush", got=failure, remedy="free disk space") from failure
        if not done:
            raise StoreTimeoutError("disk tier: flush", limit=f"{limit_s} s")

    def stats(self) -> dict[str, Any]:
        """Counters: sizes, misses by reason, and the rung and bandwidth of each drive."""
        return {**self.core.stats(), "durability": self.durability, "refused_files": list(self.refused_files)}

    def check_integrity(self) -> None:
        """Raises AssertionError when slots, extents and files do not add up."""
        if self._closed:
            return
        try:
            self.core.check_integrity()
        except PageStateError as error:
            raise AssertionError(str(error)) from error

    def close(self) -> None:
        """Ends threads and files. Bounded by `timeout_s`, even when a drive hangs. In a forked child, does nothing."""
        if self._closed or os.getpid() != self._owner:
            return
        self._closed = True
        self._finalizer.detach()
        if self.read_only:
            self.core.close(self._timeout_s)
            return
        try:
            self.core.journal_hits()
            if self.core.flush(min(self._timeout_s, 10.0)):
                self._finish_index()
            self._store.next_sequence = self.core.next_sequence
        except TierCacheError as error:
            _log.warning("disk tier: close of %s: %s", self._root, error)
        calm = self.core.close(self._timeout_s)
        if not calm:
            what = "disk tier: close of %s: I/O was still in flight after %s s"
            _log.warning(what, self._root, self._timeout_s)
        if self._writer is not None:
            self._writer.join(self._timeout_s)
        if self._index is not None and calm:
            self._index.close()
            self._store.index_crc = index_crc(self._root / "index")
        self._end_files()
        self._lock = None

    def _end_files(self) -> None:
        try:
            if self.durability == "scratch":
                for number, directory in enumerate(self.directories):
                    for path in (directory / f"drive{number}").glob("[0-9]*.seg"):
                        path.unlink()
            disk_files.write_store_file(self._root, self._store, sync=self.durability == "power")
        except (OSError, TierIOError) as error:
            _log.warning("disk tier: close of %s: %s", self._root, error)
