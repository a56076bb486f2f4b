"""CLOCK: a queue with a second chance.

Paper: Corbato, "A paging experiment with the Multics system", 1968.
Idea: a use sets a counter of `bits` bits; at the tail a page with a count loses one and returns to the
head.
Do not use it: for scans; new pages push out old ones that had no time to be used again.
"""

from __future__ import annotations

from typing import Any

from tiercache.policies.base import WORDS, push, tail, unlink
from tiercache.policies.errors import PolicyError

QUEUE = 1
LIMIT = WORDS  # greatest count


def setup(M: Any, F: Any, *, bits: int = 1) -> None:
    """`bits`: width of the counter."""
    if not 1 <= bits <= 16:
        raise PolicyError("policy clock: bits", got=bits, limit="1 to 16")
    M[LIMIT] = (1 << bits) - 1


def on_insert(R: Any, M: Any, F: Any, k: int, now: int) -> None:
    """Enters at the head, without a count."""
    R[k].freq = 0
    push(R, M, QUEUE, k)


def on_hit(R: Any, M: Any, F: Any, k: int, now: int) -> None:
    """Counts."""
    if R[k].freq < M[LIMIT]:
        R[k].freq += 1


def on_evict(R: Any, M: Any, F: Any, k: int, now: int, to_tier: int) -> None:
    """Leaves the queue."""
    unlink(R, M, k)


def victim(R: Any, M: Any, F: Any, now: int) -> int:
    """The first from the tail without a count; others return to the head, leased ones are passed over."""
    k = tail(M, QUEUE)
    while k >= 0:
        before = R[k].prev
        if R[k].lease == 0:
            if R[k].freq == 0:
                return k
            R[k].freq -= 1
            unlink(R, M, k)
            push(R, M, QUEUE, k)
        k = before if before >= 0 else tail(M, QUEUE)
    return -1
