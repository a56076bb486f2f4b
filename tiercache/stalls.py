"""Waits that a caller feels: counted in seconds, and put on the timeline."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from tiercache.entry import PageKey
from tiercache.placement import Books

# Operations that wait for a page; the others wait for room.
_READING = ("read", "take")


def count_stall(books: Books, operation: str, key: PageKey, start_s: float) -> None:
    """Counts the time since `start_s` in `stall_s` or `put_stall_s`. The lock is held."""
    end_s = books.clock.now()
    if operation in _READING:
        books.counts.stall_s += end_s - start_s
    else:
        books.counts.put_stall_s += end_s - start_s
    if books.timeline is not None:
        books.timeline.stalled(operation, str(key), start_s, end_s)


@contextmanager
def stalling(books: Books, operation: str, key: PageKey) -> Iterator[None]:
    """Counts what the block takes, whatever its end. The lock is not held."""
    start_s = books.clock.now()
    try:
        yield
    finally:
        with books.changed:
            count_stall(books, operation, key, start_s)
