"""What brings records back: the index's entries, or the segments alone."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tiercache import _core
from tiercache.errors import StoreTimeoutError, TierCacheError, TierIOError
from tiercache.tiers import disk_index_files
from tiercache.tiers.disk_index import DiskIndex, is_sound
from tiercache.tiers.disk_journal import IndexWriter

_log = logging.getLogger(__name__)


def open_path(root: Path, index_crc: int | None, *, anew: bool) -> tuple[Path, bool]:
    """Folder in which a writer opens the index, and whether it is to be made there from the segments."""
    if anew or not is_sound(root / "index", index_crc):
        return disk_index_files.begin_anew(root), True
    disk_index_files.remove_leftovers(root)
    return root / "index", False


def adopt(core: Any, digest: bytes, value: bytes) -> bool:
    """Takes one entry of the index over; False for one that is none or points nowhere."""
    try:
        return bool(_core.index_fields(value)[0][0] == digest and core.adopt(value) == "")
    except TierCacheError:
        return False


def rebuild(core: Any, progress: Callable[[int, int], None] | None) -> tuple[int, int, list[str]]:
    """Adopts the newest valid persistent record of each key from the segments alone.

    Args:
        core: of the tier.
        progress: called with segments read and segments in all.

    Returns:
        Records found, records adopted, and a line for each damaged one.
    """
    segments = core.segment_ids()
    found = adopted = 0
    bad: list[str] = []
    for number, segment in enumerate(segments, 1):
        seen, taken, _, lines = core.scan([segment])
        found, adopted, bad = found + seen, adopted + taken, bad + lines
        if progress is not None:
            progress(number, len(segments))
    return found, adopted, bad


def finish_index(
    core: Any, writer: IndexWriter, index: DiskIndex, root: Path, timeout_s: float, *, sync: bool
) -> None:
    """Gives an index that was made anew its name once it has every entry: the next process takes what it lacks for
    free room. Where that cannot be, the next process makes it again.
    """
    if index.path == root / "index":
        return
    try:
        _wait_for_entries(core, writer, index, timeout_s)
        disk_index_files.put_in_place(root, sync=sync)
    except (TierIOError, StoreTimeoutError) as error:
        _log.warning("disk tier: the index of %s is not whole: %s", root, error)
        if not writer.whole:  # most likely for lack of room
            disk_index_files.make_room(root)
    if (root / "index").exists():
        index.path = root / "index"
        disk_index_files.remove_leftovers(root)


def _wait_for_entries(core: Any, writer: IndexWriter, index: DiskIndex, timeout_s: float) -> None:
    entries, grown = 0, time.monotonic()
    done = False
    while not done:
        done = core.flush(min(1.0, timeout_s))
        if not writer.whole:
            raise TierIOError("disk tier: the index cannot be written", got=writer.error) from writer.error
        now, count = time.monotonic(), index.count()
        if count != entries:
            entries, grown = count, now
        elif not done and now > grown + timeout_s:
            raise StoreTimeoutError("disk tier: the index does not grow", limit=f"{timeout_s} s")


def end_forgotten(core: Any, writer: IndexWriter | None, timeout_s: float, owner: int) -> None:
    """Ends the threads of a tier that nobody closed, before the interpreter goes and they call into it."""
    if os.getpid() != owner:
        return
    core.flush(min(timeout_s, 10.0))
    core.close(timeout_s)
    if writer is not None:
        writer.join(timeout_s)
