"""Belady's MIN, forced and with bypass.

Paper: Belady, "A study of replacement algorithms for a virtual-storage computer", IBM Systems Journal 1966.
Idea: evict the page whose next use is farthest. With `bypass` a missed page that would itself be the victim
is not let in at all; only that is optimal (for equal sizes and costs) where pages need not enter.
Notes: pages without a next use go first. A next use that passed without a use counts as none. Next uses are
looked up in a ring of `horizon` times; the online object lets it grow.
Do not use it: when sizes or costs differ much (see planned), or without next uses: that is an error, not a
score.
"""

from __future__ import annotations

from typing import Any

from tiercache.policies.base import (
    CAPACITY,
    INCOMING,
    MAY_REFUSE,
    NEVER,
    ROUND,
    SCRATCH,
    USED,
    WORDS,
    compiled,
    last_free,
    push,
    unlink,
)
from tiercache.policies.structures import timeline
from tiercache.policies.structures.timeline import KNOWN, SIZE, is_marked, last_marked, mark, unmark

oracle = True
DEAD = 1  # pages without a next use
BYPASS = WORDS


def scratch(max_entries: int, *, bypass: bool = False, horizon: int = 1 << 14) -> int:
    """The ring of times."""
    return timeline.ring_words(horizon)


def setup(M: Any, F: Any, *, bypass: bool = False, horizon: int = 1 << 14) -> None:
    """`bypass`: whether a missed page may stay out; `horizon`: how far ahead next uses lie."""
    M[BYPASS] = bypass
    timeline.init(M, horizon)


def prepare(M: Any, ids: Any) -> None:
    """Tells the ring which page each time of a trace uses."""
    timeline.fill(M, ids)


@compiled
def place(R: Any, M: Any, k: int, when: int, now: int) -> None:
    """Notes k's next use."""
    if when < NEVER and when >= now:
        last = min(when, now + M[SIZE] - 1)
        for time in range(last, now - 1, -1):
            slot = time & (M[SIZE] - 1)
            if not is_marked(M, slot):
                if M[KNOWN] == 0:
                    M[SCRATCH + slot] = k
                R[k].pos = slot
                R[k].flag = 1
                mark(M, slot)
                return
    push(R, M, DEAD, k)


@compiled
def displace(R: Any, M: Any, k: int) -> None:
    """Forgets k's next use."""
    if R[k].flag:
        R[k].flag = 0
        unmark(M, R[k].pos)
    elif R[k].where > 0:
        unlink(R, M, k)


def on_insert(R: Any, M: Any, F: Any, k: int, now: int) -> None:
    """Enters at its next use."""
    R[k].flag = 0
    place(R, M, k, R[k].next_use, now)


def on_hit(R: Any, M: Any, F: Any, k: int, now: int) -> None:
    """A use that was foreseen for now has come; what follows is not known unless it was told."""
    if R[k].flag and R[k].next_use <= now:
        displace(R, M, k)
        push(R, M, DEAD, k)


def on_next_use(R: Any, M: Any, F: Any, k: int, when: int, now: int) -> None:
    """Moves to its new next use."""
    if R[k].resident:
        displace(R, M, k)
        place(R, M, k, when, now)


def on_evict(R: Any, M: Any, F: Any, k: int, now: int, to_tier: int) -> None:
    """Leaves."""
    displace(R, M, k)


def on_advance(R: Any, M: Any, F: Any, now: int) -> None:
    """Next uses that have passed are none; `now` is the new time."""
    slot = (now - 1) & (M[SIZE] - 1)
    if is_marked(M, slot):
        k = M[SCRATCH + slot]
        displace(R, M, k)
        push(R, M, DEAD, k)


def victim(R: Any, M: Any, F: Any, now: int) -> int:
    """The farthest next use; with bypass, perhaps that of the incoming page."""
    wanted = M[INCOMING]
    judge = M[BYPASS] and M[MAY_REFUSE] and wanted >= 0 and M[ROUND] == 0
    need = M[USED] + R[wanted].size - M[CAPACITY] if judge else 0
    own = R[wanted].next_use if judge else 0
    if judge and own >= NEVER:
        return wanted
    first = -1
    k = last_free(R, M, DEAD)
    while k >= 0:
        first = k if first < 0 else first
        need -= R[k].size
        if not judge or need <= 0:
            return first
        k = R[k].prev
        while k >= 0 and R[k].lease > 0:
            k = R[k].prev
    start = now & (M[SIZE] - 1)
    slot = last_marked(M, start - 1)  # times that have wrapped round are the later ones
    wrapped = slot >= 0
    if not wrapped:
        slot = last_marked(M, M[SIZE] - 1)
    while slot >= 0 and (wrapped or slot >= start):
        k = M[SCRATCH + slot]
        if R[k].lease == 0:
            if judge and R[k].next_use < own:
                return wanted
            first = k if first < 0 else first
            need -= R[k].size
            if not judge or need <= 0:
                return first
        slot = last_marked(M, slot - 1)
        if slot < 0 and wrapped:
            wrapped = False
            slot = last_marked(M, M[SIZE] - 1)
    return first
