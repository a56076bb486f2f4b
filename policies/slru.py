"""Segmented LRU.

Paper: Karedla, Love and Wherry, "Caching strategies to improve disk system performance", Computer 1994.
Idea: several LRU lists of equal bytes; a hit moves a page one list up, a full list sends its oldest one
down.
Do not use it: for pages larger than a list, which it refuses in a trace and keeps in the lowest list in a
store.
"""

from __future__ import annotations

from typing import Any

from tiercache.policies.base import CAPACITY, WORDS, compiled, last_free, list_bytes, push, tail, unlink
from tiercache.policies.errors import PolicyError

SEGMENTS = WORDS
SEGMENT_BYTES = WORDS + 1

admit_is_fit = True  # a page that no queue could hold; a store does not ask


def setup(M: Any, F: Any, *, segments: int = 4) -> None:
    """`segments`: number of lists."""
    if not 1 <= segments <= 7:
        raise PolicyError("policy slru: segments", got=segments, limit="1 to 7")
    M[SEGMENTS] = segments
    M[SEGMENT_BYTES] = M[CAPACITY] // segments


@compiled
def settle(R: Any, M: Any, segment: int) -> None:
    """Sends pages down from `segment` until no list above the lowest is over its bytes."""
    while segment > 1:
        while list_bytes(M, segment) > M[SEGMENT_BYTES]:
            k = tail(M, segment)
            unlink(R, M, k)
            push(R, M, segment - 1, k)
        segment -= 1


def admit(R: Any, M: Any, F: Any, k: int, now: int) -> bool:
    """Only what fits a list."""
    return R[k].size <= M[SEGMENT_BYTES]


def on_insert(R: Any, M: Any, F: Any, k: int, now: int) -> None:
    """Enters the lowest list with room."""
    for segment in range(1, M[SEGMENTS] + 1):
        if list_bytes(M, segment) + R[k].size <= M[SEGMENT_BYTES]:
            push(R, M, segment, k)
            return
    push(R, M, 1, k)


def on_hit(R: Any, M: Any, F: Any, k: int, now: int) -> None:
    """Moves one list up."""
    segment = min(R[k].where + 1, M[SEGMENTS])
    unlink(R, M, k)
    push(R, M, segment, k)
    settle(R, M, segment)


def on_evict(R: Any, M: Any, F: Any, k: int, now: int, to_tier: int) -> None:
    """Leaves its list."""
    unlink(R, M, k)


def victim(R: Any, M: Any, F: Any, now: int) -> int:
    """The oldest of the lowest list."""
    for segment in range(1, M[SEGMENTS] + 1):
        k = last_free(R, M, segment)
        if k >= 0:
            return k
    return -1
