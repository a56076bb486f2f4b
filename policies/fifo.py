"""First in, first out.

Paper: Belady, "A study of replacement algorithms for a virtual-storage computer", IBM Systems Journal 1966.
Idea: one queue in order of arrival; uses change nothing.
Do not use it: where some pages are used again and again; it is here as the baseline, and for its cost of
nothing.
"""

from __future__ import annotations

from typing import Any

from tiercache.policies.base import last_free, push, unlink

QUEUE = 1


def on_insert(R: Any, M: Any, F: Any, k: int, now: int) -> None:
    """Enters at the head."""
    push(R, M, QUEUE, k)


def on_hit(R: Any, M: Any, F: Any, k: int, now: int) -> None:
    """Nothing."""


def on_evict(R: Any, M: Any, F: Any, k: int, now: int, to_tier: int) -> None:
    """Leaves the queue."""
    unlink(R, M, k)


def victim(R: Any, M: Any, F: Any, now: int) -> int:
    """The tail."""
    return last_free(R, M, QUEUE)
