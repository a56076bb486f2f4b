"""Adaptive replacement cache, in bytes.

Paper: Megiddo and Modha, "ARC: a self-tuning, low overhead replacement cache", FAST 2003.
Idea: T1 holds pages used once, T2 pages used twice, B1 and B2 their ghosts. A hit on a ghost of B1 says
that T1 was too small and raises its target p, a hit on B2 lowers it.
Notes: p is real; its step is the ratio of the ghosts' bytes, at least one byte, times `step`. The published
step is one page of equal pages, so with bytes step=1 (which the reference vectors use) adapts slowly: give
the usual page's bytes.
Do not use it: for loops longer than the cache, where it is no better than LRU.
"""

from __future__ import annotations

from typing import Any

from tiercache.policies.base import (
    CAPACITY,
    FLOATS,
    INCOMING,
    WORDS,
    last_free,
    list_bytes,
    list_count,
    push,
    tail,
    unlink,
)
from tiercache.policies.errors import PolicyError

T1, T2, B1, B2 = 1, 2, 3, 4
GHOST_HIT = WORDS  # 0, or the ghost list that the missed page was in
P, STEP = FLOATS, FLOATS + 1


def setup(M: Any, F: Any, *, step: float = 1.0) -> None:
    """`step`: bytes that p moves at a ghost hit when both ghost lists are equal."""
    if step <= 0:
        raise PolicyError("policy arc: step must be positive", got=step)
    F[STEP] = step


def on_miss(R: Any, M: Any, F: Any, k: int, now: int) -> None:
    """Adapts p before anything is evicted."""
    M[GHOST_HIT] = 0
    where = R[k].where
    if where == B1:
        ratio = max(list_bytes(M, B2) / max(list_bytes(M, B1), 1), 1.0)
        F[P] = min(F[P] + ratio * F[STEP], float(M[CAPACITY]))
    elif where == B2:
        ratio = max(list_bytes(M, B1) / max(list_bytes(M, B2), 1), 1.0)
        F[P] = max(F[P] - ratio * F[STEP], 0.0)
    else:
        return
    unlink(R, M, k)
    M[GHOST_HIT] = where


def on_insert(R: Any, M: Any, F: Any, k: int, now: int) -> None:
    """Enters T1, or T2 after a ghost hit."""
    push(R, M, T2 if M[GHOST_HIT] else T1, k)
    R[k].flag = 0
    M[GHOST_HIT] = 0


def on_hit(R: Any, M: Any, F: Any, k: int, now: int) -> None:
    """Moves to the head of T2."""
    unlink(R, M, k)
    push(R, M, T2, k)


def on_evict(R: Any, M: Any, F: Any, k: int, now: int, to_tier: int) -> None:
    """Becomes a ghost, unless T1 alone had filled the cache."""
    where = R[k].where
    unlink(R, M, k)
    if R[k].flag == 0:
        push(R, M, where + 2, k)
    R[k].flag = 0


def on_remove(R: Any, M: Any, F: Any, k: int, now: int) -> None:
    """No ghost stays."""
    if R[k].where > 0:
        unlink(R, M, k)


def victim(R: Any, M: Any, F: Any, now: int) -> int:
    """REPLACE of the paper, after making room among the ghosts for a page that is new to all lists."""
    c = M[CAPACITY]
    if M[GHOST_HIT] == 0:
        incoming = R[M[INCOMING]].size if M[INCOMING] >= 0 else 0
        recent = list_bytes(M, T1) + list_bytes(M, B1)
        if recent + incoming > c:
            if list_count(M, B1) == 0:
                k = last_free(R, M, T1)
                if k >= 0:
                    R[k].flag = 1
                    return k
            else:
                unlink(R, M, tail(M, B1))
        elif recent + list_bytes(M, T2) + list_bytes(M, B2) >= 2 * c and list_count(M, B2) > 0:
            unlink(R, M, tail(M, B2))
    in_t1 = list_bytes(M, T1)
    first = T2
    if in_t1 > 0 and (in_t1 > F[P] or (in_t1 == F[P] and M[GHOST_HIT] == B2)):
        first = T1
    k = last_free(R, M, first)
    return k if k >= 0 else last_free(R, M, T1 + T2 - first)
