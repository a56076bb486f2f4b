"""W-TinyLFU with an adaptive window.

Paper: Einziger, Friedman and Manes, "TinyLFU: a highly efficient cache admission policy", ACM ToS 2017;
Einziger, Eytan, Friedman and Manes, "Adaptive software cache management", Middleware 2018.
Idea: new pages enter a small LRU window; what falls out of it must be wanted more often than the page it
would push out of the main space (a segmented LRU). Hill climbing on the hit ratio moves the border between
the two.
Notes: ids are dense, so uses are counted exactly, in four bits that are halved every `sample` entries'
worth of requests; rejected: a count-min sketch, whose size (by entries, not bytes) is a trap for caches of
few large pages.
Do not use it: when pages of very different size compete; it compares frequencies, never bytes.
"""

from __future__ import annotations

from typing import Any

from tiercache.policies.base import (
    CAPACITY,
    COUNT,
    FLOATS,
    INCOMING,
    WORDS,
    compiled,
    last_free,
    list_bytes,
    push,
    tail,
    unlink,
)
from tiercache.policies.errors import PolicyError

WINDOW, PROBATION, PROTECTED = 1, 2, 3
WINDOW_BYTES, PROTECTED_BYTES, CANDIDATE, EPOCH, AGED, SAMPLE, ADAPTIVE, USES, FOUND = range(WORDS, WORDS + 9)
RATE, STEP = FLOATS, FLOATS + 1
FIRST_STEP = 0.0625  # of the capacity
RESTART = 0.05  # a change of the hit ratio that means another workload
DECAY = 0.98


def setup(M: Any, F: Any, *, window_share: float = 0.01, adaptive: bool = True, sample: int = 10) -> None:
    """`window_share` of the capacity at the start; `sample`: requests per cached entry between halvings."""
    if not (0 < window_share < 1 and sample >= 1):
        raise PolicyError("policy wtinylfu: window_share, sample", got=(window_share, sample))
    M[WINDOW_BYTES] = int(M[CAPACITY] * window_share)
    M[PROTECTED_BYTES] = int(0.8 * (M[CAPACITY] - M[WINDOW_BYTES]))
    M[SAMPLE] = sample
    M[ADAPTIVE] = adaptive
    F[STEP] = FIRST_STEP


@compiled
def frequency(R: Any, M: Any, k: int) -> int:
    """Uses of k, halved once for each age since they were counted."""
    if R[k].pos != M[EPOCH]:
        R[k].freq >>= min(M[EPOCH] - R[k].pos, 30)
        R[k].pos = M[EPOCH]
    return R[k].freq


@compiled
def count(R: Any, M: Any, F: Any, k: int, found: int) -> None:
    """Counts one use of k, and ages and adapts when a sample is full."""
    R[k].freq = min(frequency(R, M, k) + 1, 15)
    M[AGED] += 1
    M[USES] += 1
    M[FOUND] += found
    full = M[SAMPLE] * max(M[COUNT], 16)
    if M[AGED] >= full:
        M[EPOCH] += 1
        M[AGED] //= 2
    if M[ADAPTIVE] and M[USES] >= full:
        climb(M, F)


@compiled
def climb(M: Any, F: Any) -> None:
    """Moves the border on while hits grow, back when they fall; steps shrink, a jump restarts them."""
    rate = M[FOUND] / M[USES]
    change = rate - F[RATE]
    step = F[STEP] if change >= 0 else -F[STEP]
    if abs(change) >= RESTART:
        F[STEP] = FIRST_STEP if step >= 0 else -FIRST_STEP
    else:
        F[STEP] = DECAY * step
    F[RATE] = rate
    M[USES] = 0
    M[FOUND] = 0
    c = M[CAPACITY]
    M[WINDOW_BYTES] = min(max(M[WINDOW_BYTES] + int(step * c), c // 100), (c * 4) // 5)
    M[PROTECTED_BYTES] = int(0.8 * (c - M[WINDOW_BYTES]))


def on_miss(R: Any, M: Any, F: Any, k: int, now: int) -> None:
    """Counts."""
    count(R, M, F, k, 0)


def on_insert(R: Any, M: Any, F: Any, k: int, now: int) -> None:
    """Enters the window, whose oldest may move on."""
    push(R, M, WINDOW, k)
    overflow(R, M, 0)


@compiled
def overflow(R: Any, M: Any, incoming: int) -> None:
    """Moves the window's oldest to the main space until `incoming` bytes more would fit the window."""
    while list_bytes(M, WINDOW) + incoming > M[WINDOW_BYTES] and tail(M, WINDOW) >= 0:
        k = tail(M, WINDOW)
        unlink(R, M, k)
        push(R, M, PROBATION, k)
        M[CANDIDATE] = k + 1


def on_hit(R: Any, M: Any, F: Any, k: int, now: int) -> None:
    """Moves to the head of its list; from probation to the protected one."""
    count(R, M, F, k, 1)
    where = R[k].where
    unlink(R, M, k)
    push(R, M, WINDOW if where == WINDOW else PROTECTED, k)
    while list_bytes(M, PROTECTED) > M[PROTECTED_BYTES] and tail(M, PROTECTED) != k:
        oldest = tail(M, PROTECTED)
        unlink(R, M, oldest)
        push(R, M, PROBATION, oldest)


def on_evict(R: Any, M: Any, F: Any, k: int, now: int, to_tier: int) -> None:
    """Leaves; its count stays."""
    if M[CANDIDATE] == k + 1:
        M[CANDIDATE] = 0
    unlink(R, M, k)


def victim(R: Any, M: Any, F: Any, now: int) -> int:
    """The newest arrival in the main space or its oldest page, whichever is wanted less."""
    overflow(R, M, R[M[INCOMING]].size if M[INCOMING] >= 0 else 0)
    oldest = last_free(R, M, PROBATION)
    if oldest < 0:
        oldest = last_free(R, M, PROTECTED)
    if oldest < 0:
        return last_free(R, M, WINDOW)
    k = M[CANDIDATE] - 1
    M[CANDIDATE] = 0
    if k < 0 or k == oldest or R[k].where != PROBATION or R[k].lease > 0:
        return oldest
    return oldest if frequency(R, M, k) > frequency(R, M, oldest) else k
