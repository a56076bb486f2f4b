"""Greedy dual size frequency, with costs.

Paper: Cherkasova, "Improving WWW proxies performance with greedy-dual-size-frequency caching policy", HP
1998.
Idea: a page's key is L + uses x cost / size; the least goes first and L becomes its key, so that old keys
age. L never falls, and the key is computed anew at each hit. A missed page is ranked before room is made for it, so in
a trace it may itself be the one that goes.
Do not use it: where byte traffic matters more than stalls: it keeps many small pages and gives up large
ones.
"""

from __future__ import annotations

from typing import Any

from tiercache.policies.base import FLOATS, INCOMING, MAY_REFUSE
from tiercache.policies.structures.heap import drop, heap_words, join, least_free, restore, touch

L = FLOATS  # the aging term
SCALE = 1.0e6  # keeps keys of usual sizes far from L's rounding


def scratch(max_entries: int) -> int:
    """The heap."""
    return heap_words(max_entries)


def on_miss(R: Any, M: Any, F: Any, k: int, now: int) -> None:
    """Its first use; the key is from before L rises for its sake."""
    R[k].freq = 1
    R[k].key = F[L] + SCALE * R[k].cost / max(R[k].size, 1)


def on_insert(R: Any, M: Any, F: Any, k: int, now: int) -> None:
    """Enters with that key."""
    join(R, M, k, R[k].key)


def on_hit(R: Any, M: Any, F: Any, k: int, now: int) -> None:
    """One use more, from today's L."""
    R[k].freq += 1
    touch(R, M, k, F[L] + R[k].freq * (SCALE * R[k].cost) / max(R[k].size, 1))


def on_evict(R: Any, M: Any, F: Any, k: int, now: int, to_tier: int) -> None:
    """L rises to the key of what goes; a removal (to no tier, by the owner) raises nothing."""
    F[L] = max(F[L], R[k].key)
    drop(R, k)


def on_remove(R: Any, M: Any, F: Any, k: int, now: int) -> None:
    """A page that is discarded says nothing about keys."""
    drop(R, k)


def victim(R: Any, M: Any, F: Any, now: int) -> int:
    """The least key, the incoming page's among them when it may stay out."""
    k = least_free(R, M)
    wanted = M[INCOMING]
    if M[MAY_REFUSE] and wanted >= 0 and R[wanted].resident == 0 and (k < 0 or R[wanted].key < R[k].key):
        F[L] = max(F[L], R[wanted].key)
        return wanted
    return k


def on_chosen(R: Any, M: Any, F: Any, now: int) -> None:
    """Leased pages come back into the heap."""
    restore(R, M)
