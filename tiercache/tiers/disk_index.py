"""The disk tier's index: LMDB from a page's digest to where its record lies.

The index is a hint. Every record proves itself, so any state of this file may cost a miss, never wrong bytes.
"""

from __future__ import annotations

import os
import stat
import struct
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import lmdb
import numpy as np

from tiercache import _core
from tiercache.errors import StoreLockedError, TierIOError

Change = tuple[bytes, int, bytes | None]

_PROBE = """
import sys
sys.path[:0] = sys.argv[3:]
import lmdb
with lmdb.open(sys.argv[1], readonly=True, lock=sys.argv[2] == "lock", create=False).begin() as txn:
    for _ in txn.cursor():
        pass
"""
_META_MAGIC = 0xBEEFC0DE
_MAP_BYTES_PER_RECORD = 1024
_SMALLEST_RECORD_BYTES = 64 << 10


class DiskIndex:
    """One environment, written by one thread.

    Args:
        path: directory of the environment. It may be renamed while it is open.
        capacity_bytes: budget of the tier; fixes the size of the map.
        sync: commits survive a power cut when `apply` returns.
        readonly: opened beside another process's writer.
    """

    def __init__(self, path: Path, capacity_bytes: int, *, sync: bool, readonly: bool = False) -> None:
        records = capacity_bytes // _SMALLEST_RECORD_BYTES
        map_bytes = min(max(16 << 20, records * _MAP_BYTES_PER_RECORD), 16 << 30)
        self.path = path
        if not readonly:
            path.mkdir(mode=0o700, exist_ok=True)
        try:
            self._env = lmdb.open(
                str(path),
                map_size=0 if readonly else map_bytes,  # 0: as the writer fixed it
                mode=0o600,
                sync=sync,
                metasync=sync,
                writemap=False,
                readahead=False,
                readonly=readonly,
                lock=not readonly or os.access(path, os.W_OK),
                create=not readonly,
                max_readers=1024,
            )
        except lmdb.Error as error:
            if "already open" in str(error):
                raise StoreLockedError(f"disk tier: {path} is open in this process already") from error
            raise TierIOError(f"disk tier: open of the index {path}", got=error) from error
        if not readonly:
            self._env.reader_check()

    def apply(self, changes: Sequence[Change]) -> None:
        """Commits changes in order. A deletion counts only for the very record it was meant for."""
        with self._env.begin(write=True) as txn:
            for digest, sequence, value in changes:
                if value is not None:
                    txn.put(digest, value)
                    continue
                known = txn.get(digest)
                if known is not None and sequence_of(known) == sequence:
                    txn.delete(digest)

    def get(self, digest: bytes) -> bytes | None:
        """The entry of one digest, as of now."""
        with self._env.begin(buffers=False) as txn:
            found: bytes | None = txn.get(digest)
            return found

    def count(self) -> int:
        """Number of entries, as of now."""
        return int(self._env.stat()["entries"])

    def entries(self) -> Iterator[tuple[bytes, bytes]]:
        """All entries of one snapshot."""
        with self._env.begin() as txn:
            yield from txn.cursor()

    def delete(self, digests: Sequence[bytes]) -> None:
        """Removes entries that were refused."""
        with self._env.begin(write=True) as txn:
            for digest in digests:
                txn.delete(digest)

    def close(self) -> None:
        """Ends the environment."""
        self._env.close()


def sequence_of(value: bytes) -> int:
    """Sequence number in an entry; -1 when it is no entry of ours."""
    if len(value) < _core.INDEX_SEQUENCE_OFFSET + 8:
        return -1
    found: int = struct.unpack_from("<Q", value, _core.INDEX_SEQUENCE_OFFSET)[0]
    return found


def index_crc(path: Path) -> int | None:
    """CRC32C of the environment's data file; None when there is no such file."""
    crc = 0
    try:
        handle = os.open(path / "data.mdb", os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    with os.fdopen(handle, "rb") as file:
        while block := file.read(1 << 22):
            crc = _core.crc32c(np.frombuffer(block, np.uint8), crc)
    return crc


def is_ours(path: Path) -> bool:
    """Whether the environment is a directory of this user's with plain files of theirs: LMDB follows any symlink."""
    users = {os.geteuid()} if os.geteuid() else None  # root may look into anybody's
    try:
        home = path.lstat()
        files = [entry.stat(follow_symlinks=False) for entry in os.scandir(path)]
    except OSError:
        return False
    owned = users is None or {home.st_uid, *(file.st_uid for file in files)} <= users
    plain = stat.S_ISDIR(home.st_mode) and all(stat.S_ISREG(file.st_mode) for file in files)
    return owned and plain and not home.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def is_sound(path: Path, expected_crc: int | None) -> bool:
    """Whether LMDB can walk this index. It trusts its file and would crash on a damaged one, so a file that is not
    the one of the last clean close is walked by a child process first.
    """
    if not is_ours(path):
        return False
    try:
        with (path / "data.mdb").open("rb") as file:
            meta = file.read(8192)
        if len(meta) < 8192:
            return False
        magics = [struct.unpack_from("<I", meta, offset + 16)[0] for offset in (0, 4096)]
    except OSError:
        return False
    if magics != [_META_MAGIC, _META_MAGIC]:
        return False
    if expected_crc is not None and index_crc(path) == expected_crc:
        return True
    try:
        walk = subprocess.run(
            [
                sys.executable,
                "-S",
                "-c",
                _PROBE,
                str(path),
                "lock" if os.access(path, os.W_OK) else "",  # beside a writer, which would reuse pages
                _package_root(),
            ],
            check=False,
            timeout=60,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return walk.returncode == 0


def _package_root() -> str:
    return str(Path(lmdb.__file__).parent.parent)
