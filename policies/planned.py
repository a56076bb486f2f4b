"""The store's own policy when a plan is followed: size times distance over cost.

Source: the project's own measurement; near optimal given sizes and costs, where Belady's looks at
distance only.
Idea: among resident pages evict the greatest size x (next use - now) / reload cost: the most room, for the
longest time, for the least stall. Pages with no next use go first, least recently used before others.
Do not use it: without next uses (it is then LRU by pages), or with a plan that the run does not follow.
"""

from __future__ import annotations

from typing import Any

from tiercache.policies.base import NEVER, SCRATCH, WORDS

CLOCK = WORDS  # counts uses; a page's last one is in its key
NUM = WORDS + 1  # resident pages, dense in SCRATCH; a page's place there is in its pos

oracle = True


def scratch(max_entries: int) -> int:
    """One word a page."""
    return max_entries


def on_insert(R: Any, M: Any, F: Any, k: int, now: int) -> None:
    """Joins the resident pages."""
    M[CLOCK] += 1
    R[k].key = M[CLOCK]
    R[k].pos = M[NUM]
    M[SCRATCH + M[NUM]] = k
    M[NUM] += 1


def on_hit(R: Any, M: Any, F: Any, k: int, now: int) -> None:
    """Notes the use, for ties."""
    M[CLOCK] += 1
    R[k].key = M[CLOCK]


def on_evict(R: Any, M: Any, F: Any, k: int, now: int, to_tier: int) -> None:
    """The last page takes its place."""
    M[NUM] -= 1
    last = M[SCRATCH + M[NUM]]
    M[SCRATCH + R[k].pos] = last
    R[last].pos = R[k].pos


def victim(R: Any, M: Any, F: Any, now: int) -> int:
    """Scans the resident pages: exact, since scores cross as time goes on; about a nanosecond a page."""
    best = -1
    best_score = -1.0
    best_use = 0.0
    for i in range(M[NUM]):
        k = M[SCRATCH + i]
        if R[k].lease > 0:
            continue
        when = R[k].next_use
        if when >= NEVER or when < now:  # a use that did not come is no use
            score = 1e300
        else:
            score = R[k].size * float(when - now) / (R[k].cost + 1e-12)
        if score > best_score or (score == best_score and R[k].key < best_use):
            best = k
            best_score = score
            best_use = R[k].key
    return best
