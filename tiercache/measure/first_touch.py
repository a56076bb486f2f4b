"""Memory that a virtual machine has yet to get from its host."""

from __future__ import annotations

import mmap
import time
from contextlib import suppress

from tiercache import _core

_PIECE_BYTES = 256 << 20
_AVAILABLE_SHARE = 0.75  # of what is available, at most


def touch_memory(num_bytes: int) -> float:
    """Writes once to memory that is free, and gives it back; returns the seconds.

    A virtual machine's host may give it memory at the first write only, and take back what lies free for a while. Seen:
    2 to 7 s a GiB, where other writes to memory that is new to a process take 0.05 to 0.25 s. What is measured first on
    such a machine looks slow for no fault of its own.

    Args:
        num_bytes: how much; at most three quarters of what is available are touched.
    """
    begin = time.perf_counter()
    pieces: list[mmap.mmap] = []
    for _ in range(min(num_bytes, int(_core.available_memory() * _AVAILABLE_SHARE)) // _PIECE_BYTES):
        try:
            piece = mmap.mmap(-1, _PIECE_BYTES)
        except OSError:  # a limit of the process: what it may not have, it need not touch
            break
        with suppress(OSError, AttributeError):  # not in every kernel
            piece.madvise(mmap.MADV_HUGEPAGE)  # a third of the time
        for offset in range(0, _PIECE_BYTES, mmap.PAGESIZE):
            piece[offset] = 1
        pieces.append(piece)
    for piece in pieces:
        piece.close()
    return time.perf_counter() - begin
