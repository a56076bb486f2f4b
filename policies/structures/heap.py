"""A lazy min-heap of (key, time, id) in M's scratch, four children a node, ties by time.

Notes. A hit only writes the entry's true key (R[k].key) and time (R[k].prev): the heap learns of it when
the stored pair reaches the root, is found older than the true one, and sinks back. So a hit costs nothing,
which is right as long as keys grow. A key that became smaller than the stored one (an entry that grew in
bytes) is pushed again at once, otherwise it would hide below its old place. R[k].pos is the time of
the entry's live pair; pairs with another time are dead and dropped at the root. Rejected: sifting at every
hit, ten times the work under skew.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tiercache.policies.base import SCRATCH, WORDS, compiled

ASIDE = WORDS + 13  # 1 + the first entry that is put aside
NUM = WORDS + 14  # pairs in the heap
CLOCK = WORDS + 15  # counts joins and touches: the time of ties
ID_BITS = 31
ID_MASK = (1 << 31) - 1


def heap_words(max_entries: int) -> int:
    """Scratch for `max_entries`: each may have a live and a dead pair before the heap is rebuilt."""
    return 2 * (2 * max_entries + 64)


@compiled
def bits(key: float) -> int:
    """The order of non-negative floats as integers."""
    order: int = np.float64(key).view(np.int64)  # type: ignore[assignment]
    return order


@compiled
def sink(M: Any, i: int) -> None:
    """Moves the pair at i down to its place."""
    n = M[NUM]
    key, tag = M[SCRATCH + 2 * i], M[SCRATCH + 2 * i + 1]
    while True:
        best = -1
        best_key, best_tag = key, tag
        for c in range(4 * i + 1, min(4 * i + 5, n)):
            at = SCRATCH + 2 * c
            if M[at] < best_key or (M[at] == best_key and M[at + 1] < best_tag):
                best, best_key, best_tag = c, M[at], M[at + 1]
        if best < 0:
            break
        M[SCRATCH + 2 * i], M[SCRATCH + 2 * i + 1] = best_key, best_tag
        i = best
    M[SCRATCH + 2 * i], M[SCRATCH + 2 * i + 1] = key, tag


@compiled
def rise(M: Any, i: int) -> None:
    """Moves the pair at i up to its place."""
    key, tag = M[SCRATCH + 2 * i], M[SCRATCH + 2 * i + 1]
    while i > 0:
        up = (i - 1) // 4
        at = SCRATCH + 2 * up
        if M[at] < key or (M[at] == key and M[at + 1] < tag):
            break
        M[SCRATCH + 2 * i], M[SCRATCH + 2 * i + 1] = M[at], M[at + 1]
        i = up
    M[SCRATCH + 2 * i], M[SCRATCH + 2 * i + 1] = key, tag


@compiled
def push_pair(R: Any, M: Any, k: int) -> None:
    """Pushes the true key of k as its live pair; rebuilds first when dead pairs have filled the heap."""
    if SCRATCH + 2 * (M[NUM] + 1) > len(M):
        n = 0
        for i in range(M[NUM]):
            who = M[SCRATCH + 2 * i + 1] & ID_MASK
            if who != k and R[who].flag and R[who].pos == M[SCRATCH + 2 * i + 1] >> ID_BITS:
                M[SCRATCH + 2 * n], M[SCRATCH + 2 * n + 1] = M[SCRATCH + 2 * i], M[SCRATCH + 2 * i + 1]
                n += 1
        M[NUM] = n
        for i in range((n + 2) // 4, -1, -1):
            if i < n:
                sink(M, i)
    R[k].pos = R[k].prev
    at = SCRATCH + 2 * M[NUM]
    M[at] = bits(R[k].key)
    M[at + 1] = (np.int64(R[k].prev) << ID_BITS) | k
    M[NUM] += 1
    rise(M, M[NUM] - 1)


@compiled
def stamp(R: Any, M: Any) -> int:
    """The next time. Before it leaves 31 bits all times are halved: ties lose some order, nothing else."""
    if M[CLOCK] >= ID_MASK - 1:
        M[CLOCK] >>= 1
        for k in range(len(R)):
            R[k].prev >>= 1
            R[k].pos >>= 1
        for i in range(M[NUM]):
            tag = M[SCRATCH + 2 * i + 1]
            M[SCRATCH + 2 * i + 1] = ((tag >> ID_BITS) >> 1) << ID_BITS | (tag & ID_MASK)
    M[CLOCK] += 1
    return M[CLOCK]


@compiled
def join(R: Any, M: Any, k: int, key: float) -> None:
    """Entry k joins with `key`."""
    R[k].prev = stamp(R, M)
    R[k].key = key
    R[k].flag = 1
    push_pair(R, M, k)


@compiled
def touch(R: Any, M: Any, k: int, key: float) -> None:
    """Entry k has a new key and is the youngest among equals."""
    old = R[k].key
    R[k].key = key
    R[k].prev = stamp(R, M)
    if key < old:  # the stored pair may be later than the true one: it cannot wait for the root
        push_pair(R, M, k)


@compiled
def drop(R: Any, k: int) -> None:
    """Entry k leaves; its pair dies."""
    R[k].flag = 0


@compiled
def pop_root(M: Any) -> None:
    """Drops the root."""
    M[NUM] -= 1
    n = M[NUM]
    M[SCRATCH], M[SCRATCH + 1] = M[SCRATCH + 2 * n], M[SCRATCH + 2 * n + 1]
    if n > 0:
        sink(M, 0)


@compiled
def least_free(R: Any, M: Any) -> int:
    """The entry with the least (key, time) that is not leased, -1 when there is none. It stays.

    Leased ones are put aside, linked by `next`, until `restore`.
    """
    while M[NUM] > 0:
        tag = M[SCRATCH + 1]
        k = tag & ID_MASK
        if R[k].flag == 0 or R[k].pos != tag >> ID_BITS:  # dead
            pop_root(M)
        elif R[k].prev != R[k].pos:  # touched since: sinks to its true place
            R[k].pos = R[k].prev
            M[SCRATCH] = bits(R[k].key)
            M[SCRATCH + 1] = (np.int64(R[k].prev) << ID_BITS) | k
            sink(M, 0)
        elif R[k].lease > 0:
            pop_root(M)
            R[k].next = M[ASIDE] - 1
            M[ASIDE] = k + 1
        else:
            return int(k)
    return -1


@compiled
def restore(R: Any, M: Any) -> None:
    """Puts back what `least_free` put aside; a policy's `on_chosen`."""
    k = M[ASIDE] - 1
    M[ASIDE] = 0
    while k >= 0:
        push_pair(R, M, k)
        k = R[k].next
