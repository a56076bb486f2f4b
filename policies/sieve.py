"""SIEVE.

Paper: Zhang et al., "SIEVE is simpler than LRU", NSDI 2024.
Idea: pages stay where they entered; a hand goes from the oldest to the newest, clears the mark of used
pages and evicts the first without one. New pages meet the hand early, so one-time pages leave quickly.
Do not use it: for back-and-forth scans, or when what was hot goes cold: a mark survives a whole round of
the hand.
"""

from __future__ import annotations

from typing import Any

from tiercache.policies.base import WORDS, push, tail, unlink

QUEUE = 1
HAND = WORDS  # id + 1 of the page under the hand, 0 for the tail


def on_insert(R: Any, M: Any, F: Any, k: int, now: int) -> None:
    """Enters at the head, unmarked."""
    R[k].flag = 0
    push(R, M, QUEUE, k)


def on_hit(R: Any, M: Any, F: Any, k: int, now: int) -> None:
    """Marks."""
    R[k].flag = 1


def on_evict(R: Any, M: Any, F: Any, k: int, now: int, to_tier: int) -> None:
    """Leaves the queue; the hand moves on when it pointed here, whoever took the page out."""
    if M[HAND] == k + 1:
        M[HAND] = R[k].prev + 1
    unlink(R, M, k)


def victim(R: Any, M: Any, F: Any, now: int) -> int:
    """The first unmarked page from the hand on; leased ones are passed over."""
    k = M[HAND] - 1
    if k < 0:
        k = tail(M, QUEUE)
    while k >= 0:
        if R[k].lease == 0:
            if R[k].flag == 0:
                M[HAND] = k + 1
                return k
            R[k].flag = 0
        k = R[k].prev
        if k < 0:
            k = tail(M, QUEUE)
    return -1
