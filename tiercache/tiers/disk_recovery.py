"""What brings records back: the index's entries, or the segments alone."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from tiercache import _core
from tiercache.errors import TierCacheError
from tiercache.tiers.disk_journal import IndexWriter


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


def end_forgotten(core: Any, writer: IndexWriter | None, timeout_s: float, owner: int) -> None:
    """Ends the threads of a tier that nobody closed, before the interpreter goes and they call into it."""
    if os.getpid() != owner:
        return
    core.flush(min(timeout_s, 10.0))
    core.close(timeout_s)
    if writer is not None:
        writer.join(timeout_s)
