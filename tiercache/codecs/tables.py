"""Static tables of the exponent codec, one per (layer, kind): trained on first pages, versioned, shared."""

from __future__ import annotations

import hashlib
import json
import os
import threading
from pathlib import Path
from typing import Any

from tiercache._core import ExponentTable
from tiercache.errors import CodecError
from tiercache.folders import sync_directory

Place = tuple[int, str]  # layer and kind of a page

TABLE_BYTES = 40
ID_BYTES = 8
_LEVELS = 6
_FORMAT = 2


def pack_table(table: ExponentTable) -> bytes:
    """A table as 40 bytes: prediction, base, ranks of 6 levels, symbols of 32 ranks."""
    return bytes([table.prediction, table.base, *table.levels, *table.order])


def unpack_table(packed: bytes) -> ExponentTable:
    """The table of 40 bytes. Raises CodecError when they are none."""
    if len(packed) != TABLE_BYTES:
        raise CodecError("exponent table has the wrong size", got=len(packed), limit=TABLE_BYTES)
    return ExponentTable(packed[0], packed[1], list(packed[2 : 2 + _LEVELS]), list(packed[2 + _LEVELS :]))


def table_id(packed: bytes) -> bytes:
    """A table's 8-byte id: the BLAKE2b digest of its bytes, so an id can't come to mean another table."""
    return hashlib.blake2b(packed, digest_size=ID_BYTES).digest()


class TableStore:
    """Tables by id and by (layer, kind), kept in a file beside the index when a directory is given.

    The file `codec_tables.jsonl` has one table a line and is only appended to; a table is on disk before
    `publish` returns, so no committed page names a table that a crash can lose. A torn last line is ignored.
    Safe from several threads. Another process that appends is noticed by `find`, which reads the file again.

    Args:
        directory: where the file is; None keeps tables in memory only, and pages then carry their table.

    Raises:
        CodecError: the file holds a line that is no table.
    """

    FILE = "codec_tables.jsonl"

    def __init__(self, directory: str | Path | None = None) -> None:
        self._path = None if directory is None else Path(directory) / self.FILE
        self._writable = True
        self._lock = threading.Lock()
        self._by_id: dict[bytes, ExponentTable] = {}
        self._versions: dict[Place, list[bytes]] = {}
        self.load()

    @property
    def durable(self) -> bool:
        """Whether a page may name its table instead of carrying it."""
        return self._path is not None and self._writable

    def current(self, place: Place) -> tuple[bytes, ExponentTable] | None:
        """Id and table of the newest version for (layer, kind); None before the first."""
        with self._lock:
            versions = self._versions.get(place)
            return None if not versions else (versions[-1], self._by_id[versions[-1]])

    def version(self, place: Place) -> int:
        """How many versions (layer, kind) has had."""
        with self._lock:
            return len(self._versions.get(place, []))

    def find(self, id_bytes: bytes) -> ExponentTable:
        """The table that a page names.

        Raises:
            CodecError: no such table, not even in the file as it is now.
        """
        with self._lock:
            if id_bytes not in self._by_id:
                self._load()
            table = self._by_id.get(id_bytes)
        if table is None:
            raise CodecError(
                "the page names an unknown exponent table",
                got=id_bytes.hex(),
                remedy=f"keep {self.FILE} beside the index of the store",
            )
        return table

    def publish(self, place: Place, table: ExponentTable) -> bytes:
        """Makes `table` the newest version for (layer, kind), on disk first; returns its id."""
        packed = pack_table(table)
        id_bytes = table_id(packed)
        with self._lock:
            versions = self._versions.setdefault(place, [])
            if versions and versions[-1] == id_bytes:
                return id_bytes
            self._append(place, len(versions) + 1, packed)
            self._by_id[id_bytes] = table
            versions.append(id_bytes)
        return id_bytes

    def keep_in(self, directory: str | Path, *, writable: bool = True) -> None:
        """Takes up the tables that are in a directory and, if it may be written to, keeps later ones there.

        Raises:
            CodecError: the file there holds a line that is no table.
        """
        with self._lock:
            self._path = Path(directory) / self.FILE
            self._writable = writable
            self._load()

    def load(self) -> None:
        """Reads the file, if there is one, and adds what is new."""
        with self._lock:
            self._load()

    def save(self, directory: str | Path) -> None:
        """Writes all tables into `directory` and keeps them there from now on."""
        with self._lock:
            self._path = Path(directory) / self.FILE
            self._path.parent.mkdir(parents=True, exist_ok=True)
            for place, versions in self._versions.items():
                for number, id_bytes in enumerate(versions, start=1):
                    self._append(place, number, pack_table(self._by_id[id_bytes]))

    def _append(self, place: Place, version: int, packed: bytes) -> None:
        if self._path is None or not self._writable:
            return
        layer, kind = place
        line = json.dumps(
            {"format": _FORMAT, "layer": layer, "kind": kind, "version": version, "table": packed.hex()}
        )
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
        file = os.open(self._path, flags, 0o600)
        try:
            size = os.fstat(file).st_size
            torn = size > 0 and os.pread(file, 1, size - 1) != b"\n"
            os.write(file, ("\n" if torn else "").encode() + line.encode() + b"\n")
            os.fsync(file)
        finally:
            os.close(file)
        if size == 0:  # its name is to outlive a power cut too
            sync_directory(self._path.parent)

    def _load(self) -> None:
        if self._path is None or not self._path.exists():
            return
        complete = self._path.read_bytes().rpartition(b"\n")[0]
        kept: dict[Place, list[bytes]] = {}
        for line in complete.splitlines():
            record = _parse(line)
            if record is None:
                continue
            place, packed = record
            id_bytes = table_id(packed)
            if id_bytes not in self._by_id:
                self._by_id[id_bytes] = unpack_table(packed)
            versions = kept.setdefault(place, [])
            if not versions or versions[-1] != id_bytes:  # several processes may publish the same one
                versions.append(id_bytes)
        for place, versions in kept.items():  # an earlier table may be the newest again
            known = self._versions.get(place, [])
            self._versions[place] = versions + [mine for mine in known if mine not in versions]


def _parse(line: bytes) -> tuple[Place, bytes] | None:
    """Place and packed table of a line; None for one that a crash tore."""
    try:
        record: dict[str, Any] = json.loads(line)
        if record["format"] != _FORMAT:
            raise CodecError("codec tables of another format", got=record["format"], limit=_FORMAT)
        return (int(record["layer"]), str(record["kind"])), bytes.fromhex(record["table"])
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError, ValueError) as error:
        if isinstance(error, CodecError):
            raise
        return None
