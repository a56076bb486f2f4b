"""The store's own policy when a plan is followed: size times distance over cost.

Source: the project's own measurement; near optimal given sizes and costs, where Belady's looks at
distance only.
Idea: among resident pages evict the greatest size x (next use - now) / reload cost: the most room, for the
longest time, for the least stall. Pages with no next use go first, least recently used before others.
Do not use it: without next uses (it is then LRU by pages), or with a plan that the run does not follow.
"""

from __future__ import annotations

from typing import Any

from tiercache.policies.base import NOW, WORDS
from tiercache.policies.structures.tournament import (
    first_free,
    join,
    leave,
    renew,
    restore,
    tournament_words,
)

CLOCK = WORDS  # counts uses; a page's last one is in its key, for ties

oracle = True


def scratch(max_entries: int) -> int:
    """The tournament."""
    return tournament_words(max_entries)


def on_insert(R: Any, M: Any, F: Any, k: int, now: int) -> None:
    """Joins the resident pages."""
    M[CLOCK] += 1
    R[k].key = M[CLOCK]
    join(R, M, k, now)


def on_hit(R: Any, M: Any, F: Any, k: int, now: int) -> None:
    """Notes the use, for ties."""
    M[CLOCK] += 1
    R[k].key = M[CLOCK]
    renew(R, M, k, now)


def on_next_use(R: Any, M: Any, F: Any, k: int, when: int, now: int) -> None:
    """The page's score falls from elsewhere now."""
    R[k].next_use = when
    if R[k].resident:
        renew(R, M, k, now)


def on_resize(R: Any, M: Any, F: Any, k: int, delta: int) -> None:
    """The page's score falls faster or slower."""
    if R[k].resident:
        R[k].size += delta
        renew(R, M, k, M[NOW])
        R[k].size -= delta  # the engine adds it


def on_evict(R: Any, M: Any, F: Any, k: int, now: int, to_tier: int) -> None:
    """Leaves."""
    leave(R, M, k, now)


def victim(R: Any, M: Any, F: Any, now: int) -> int:
    """The greatest score among pages that are not leased."""
    return first_free(R, M, now)


def on_chosen(R: Any, M: Any, F: Any, now: int) -> None:
    """Leased pages are compared again."""
    restore(R, M, now)
