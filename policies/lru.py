"""Least recently used.

Paper: Denning, "The working set model for program behavior", CACM 1968 (and folklore before).
Idea: one list in order of last use; what was used longest ago goes first.
Do not use it: for scans and loops longer than the cache, where it evicts each page just before its use; a
pass over a tree that repeats its order is such a loop.
"""

from __future__ import annotations

from typing import Any

from tiercache.policies.base import head, last_free, push, unlink

QUEUE = 1


def on_insert(R: Any, M: Any, F: Any, k: int, now: int) -> None:
    """Enters at the head."""
    push(R, M, QUEUE, k)


def on_hit(R: Any, M: Any, F: Any, k: int, now: int) -> None:
    """Moves to the head."""
    if head(M, QUEUE) != k:
        unlink(R, M, k)
        push(R, M, QUEUE, k)


def on_evict(R: Any, M: Any, F: Any, k: int, now: int, to_tier: int) -> None:
    """Leaves the list."""
    unlink(R, M, k)


def victim(R: Any, M: Any, F: Any, now: int) -> int:
    """The tail."""
    return last_free(R, M, QUEUE)
