"""The small files beside the segments: STORE, and what it says of the directories.

root/STORE          what the store is: uuid, epoch, durability; JSON
root/LOCK           held by the writer
root/index/         LMDB; disk_index_files
directory/driveN/   segment files, of the N-th directory; root is the first one
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import secrets
import stat
import struct
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from tiercache.errors import ConfigError, PageCorruptError
from tiercache.folders import io_error, make_directory, sync_directory
from tiercache.tiers.disk_index_files import set_aside

FORMAT = 1
_MAX_STORE_BYTES = 1 << 16


@dataclass(kw_only=True)
class StoreFile:
    """Content of STORE.

    Attributes:
        uuid: 32 hexadecimal digits, in every segment and record header.
        epoch: counts the opens for writing; a segment keeps the one it was made in.
        next_sequence: no record of this store has this number or a higher one, after a clean close.
        durability: of the last writer.
        boot_id: of the kernel under the last writer: what was not synced is gone when it changed.
        index_crc: CRC32C of the index after a clean close; None while a writer has it open.
        drives: number of directories.
    """

    uuid: str
    epoch: int = 0
    next_sequence: int = 1
    durability: str = "scratch"
    boot_id: str = ""
    index_crc: int | None = None
    drives: int = 1
    format: int = FORMAT

    def trusts_index(self, boot: str) -> bool:
        """Whether the index holds what its writer put there: without syncs, a reboot may have torn it, and the records
        too; only the segments prove themselves.
        """
        return self.durability == "power" or self.boot_id == boot


def boot_id() -> str:
    """The kernel's name for this boot; empty where it has none."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def read_store_file(root: Path) -> StoreFile | None:
    """STORE of this root, or None when there is none. Raises PageCorruptError when it is not what we wrote."""
    path = root / "STORE"
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise io_error(f"disk tier: open of {path}", error, "remove it if it is not a store's") from error
    status = os.fstat(handle)
    if not stat.S_ISREG(status.st_mode) or status.st_uid not in (os.geteuid(), 0):
        os.close(handle)
        raise PageCorruptError(f"disk tier: {path} is not a plain file of this user's", remedy="move it away")
    with os.fdopen(handle, "rb") as file:
        text = file.read(_MAX_STORE_BYTES + 1)
    remedy = "name another directory, or remove this store"
    try:
        if len(text) > _MAX_STORE_BYTES:
            raise ValueError("too long")
        found = json.loads(text)
        if found.get("format") != FORMAT:
            raise ConfigError(
                f"disk tier: {path} is of another version",
                got=found.get("format"),
                limit=FORMAT,
                remedy=remedy,
            )
        store = StoreFile(**found)
        numbers = (store.epoch, store.next_sequence, store.drives, store.index_crc or 0)
        if len(bytes.fromhex(store.uuid)) != 16 or not all(
            isinstance(n, int) and 0 <= n < 1 << 62 for n in numbers
        ):
            raise ValueError("impossible field")
    except (ValueError, TypeError, AttributeError) as error:
        raise PageCorruptError(f"disk tier: {path} is damaged", got=error, remedy=remedy) from error
    return store


def write_store_file(root: Path, store: StoreFile, *, sync: bool) -> None:
    """Replaces STORE in one step; `sync`: it survives a power cut when this returns."""
    fresh = root / "STORE.new"
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        handle = os.open(fresh, flags, 0o600)
        with os.fdopen(handle, "w") as file:
            json.dump(asdict(store), file)
            file.flush()
            if sync:
                os.fsync(file.fileno())
        fresh.rename(root / "STORE")
        if sync:
            sync_directory(root)
    except OSError as error:
        fresh.unlink(missing_ok=True)
        remedy = "free disk space" if error.errno in (errno.ENOSPC, errno.EDQUOT) else None
        raise io_error(f"disk tier: writing {root / 'STORE'}", error, remedy) from error


def new_store_file() -> StoreFile:
    """STORE of a store that has never been."""
    return StoreFile(uuid=secrets.token_hex(16))


def check_drives(directories: Sequence[Path]) -> None:
    """Raises ConfigError unless each directory has the drive of its number: in another order records would be lost."""
    for number, directory in enumerate(directories):
        if number == 0 or (directory / f"drive{number}").exists():
            continue
        raise ConfigError(
            f"disk tier: {directory} has no drive{number} of this store",
            got=sorted(path.name for path in directory.glob("drive*")) or "none",
            limit=f"drive{number}",
            remedy="name the directories in the order of open_store; make an empty one if that drive was lost",
        )


def next_epoch(directories: list[Path], durability: str) -> tuple[StoreFile, StoreFile]:
    """STORE as it was, and as this process has written it for its own writing. Call with the lock held.

    Raises:
        ConfigError: the store was made for another durability or with other directories.
    """
    root = directories[0]
    was = read_store_file(root) or new_store_file()
    if durability == "scratch" and was.durability != "scratch":
        raise ConfigError(
            f"disk tier: {root} holds pages that outlive a process",
            got="durability scratch",
            limit=f"durability {was.durability}",
            remedy="open it with that durability, name another directory, or remove this store",
        )
    if was.drives != len(directories) and was.epoch > 0:
        raise ConfigError(
            f"disk tier: {root} was made with other directories",
            got=len(directories),
            limit=was.drives,
            remedy="name the same directories in the same order",
        )
    if was.durability == "scratch":
        for number, directory in enumerate(directories):
            make_directory(directory / f"drive{number}")
    else:
        check_drives(directories)
    store = replace(
        was,
        epoch=was.epoch + 1,
        durability=durability,
        drives=len(directories),
        boot_id=boot_id(),
        index_crc=None,
    )
    kept = was.epoch > 0 and was.durability != "scratch"
    if kept and not was.trusts_index(store.boot_id):
        set_aside(root)  # first: the file that is written next no longer says so
    write_store_file(root, store, sync=durability == "power")
    return was, store


def writer_pid(root: Path) -> int | None:
    """Pid of the process that has the store open for writing. Not for that process itself: closing any descriptor
    of LOCK would drop its lock.
    """
    try:
        handle = os.open(root / "LOCK", os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        # struct flock of 64-bit Linux: type, whence, start, length, pid
        asked = struct.pack("hhxxxxqqixxxx", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
        kind, _, _, _, pid = struct.unpack("hhxxxxqqixxxx", fcntl.fcntl(handle, fcntl.F_GETLK, asked))
    finally:
        os.close(handle)
    return None if kind == fcntl.F_UNLCK else int(pid)
