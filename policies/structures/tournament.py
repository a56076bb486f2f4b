"""A kinetic tournament in M's scratch: which of many pages has the greatest weight x (next use - now), as time goes on.

Notes. A page's score is a line that falls with time, so the best page changes without any page being touched. Every
match of the tree keeps its winner and the time until which that is certain: when the two lines cross, or when one of
its own matches below ends. A query replays only matches whose time has come, an update only those on one path, and
stops where nothing changes: about a microsecond where a scan of 100,000 pages takes a hundred. Times are kept on
the safe side of a crossing by more than the rounding of scores, and near one a match is replayed at every step; so the
winner is the one that a scan of all scores finds, ties by R[k].key included.
Rejected: a heap by score (all scores change with each step), buckets of equal weight (as many as pages, where costs
are measured).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tiercache.policies.base import NEVER, SCRATCH, WORDS, compiled

ASIDE = WORDS + 10  # 1 + the first page that is hidden
SIZE = WORDS + 11  # leaves, a power of two
NUM = WORDS + 12  # leaves that were ever used
FREE = WORDS + 13  # 1 + the first free one of them; the others are linked by their second word
GONE = 1.0e300  # score of a page that is not used again
ROUNDING = 1.0e-15  # relative, of a weight and of a score, with room to spare


def tournament_words(max_entries: int) -> int:
    """Scratch for so many pages: a winner and a time for each node of a full tree."""
    size = 1
    while size < max_entries:
        size *= 2
    return 4 * size


@compiled
def weight_of(R: Any, k: int) -> float:
    """Bytes per second of reload: how fast k's score falls."""
    return R[k].size / (R[k].cost + 1e-12)


@compiled
def score(R: Any, k: int, now: int) -> float:
    """Weight times distance; GONE for a page with no use to come."""
    when = R[k].next_use
    if when >= NEVER or when < now:
        return GONE
    return weight_of(R, k) * float(when - now)


@compiled
def certain_until(R: Any, a: int, b: int, now: int) -> int:
    """The time before which the scores of a and b certainly keep their order, later than `now`."""
    if R[a].next_use >= NEVER or R[b].next_use >= NEVER or R[a].next_use < now or R[b].next_use < now:
        return NEVER  # a page that becomes overdue ends its own leaf
    v = weight_of(R, a)
    w = weight_of(R, b)
    x = float(R[a].next_use)
    y = float(R[b].next_use)
    if v == w:
        return NEVER if x != y else now + 1
    cross = (v * x - w * y) / (v - w)
    unsure = 2.0 + ROUNDING * (v * x + w * y) / abs(v - w)
    if cross + unsure < now or cross - unsure > 4.0e18:
        return NEVER
    return max(now + 1, int(np.floor(cross - unsure)))


@compiled
def settle_leaf(R: Any, M: Any, node: int, now: int) -> None:
    """A page's leaf ends when its next use has passed."""
    k = M[SCRATCH + 2 * node]
    when = R[k].next_use if k >= 0 else NEVER
    M[SCRATCH + 2 * node + 1] = when + 1 if now <= when < NEVER else NEVER


@compiled
def play(R: Any, M: Any, node: int, now: int) -> None:
    """The match of a node's two children."""
    at = SCRATCH + 4 * node
    a, b = M[at], M[at + 2]
    until = min(M[at + 1], M[at + 3])
    winner = a
    if a < 0 or b < 0:
        winner = max(a, b)
    else:
        first, second = score(R, a, now), score(R, b, now)
        if second > first or (second == first and R[b].key < R[a].key):
            winner = b
        until = min(until, certain_until(R, a, b, now))
    M[SCRATCH + 2 * node] = winner
    M[SCRATCH + 2 * node + 1] = until


@compiled
def replay_up(R: Any, M: Any, k: int, leaf: int, now: int) -> None:
    """Plays the matches above a leaf that page k holds, has left or has changed in, as far as that matters."""
    node = (M[SIZE] + leaf) >> 1
    while node > 0:
        winner = M[SCRATCH + 2 * node]
        until = M[SCRATCH + 2 * node + 1]
        play(R, M, node, now)
        after = M[SCRATCH + 2 * node]
        if winner != k and after == winner and M[SCRATCH + 2 * node + 1] == until:
            return
        node >>= 1


@compiled
def grow(R: Any, M: Any, now: int) -> None:
    """Doubles the tree."""
    old = M[SIZE]
    size = max(2 * old, 1)
    for leaf in range(old - 1, -1, -1):  # moves to the right, the last one first
        M[SCRATCH + 2 * (size + leaf)] = M[SCRATCH + 2 * (old + leaf)]
        M[SCRATCH + 2 * (size + leaf) + 1] = M[SCRATCH + 2 * (old + leaf) + 1]
    for leaf in range(old, size):
        M[SCRATCH + 2 * (size + leaf)] = -1
        M[SCRATCH + 2 * (size + leaf) + 1] = NEVER
    M[SIZE] = size
    for node in range(size - 1, 0, -1):
        play(R, M, node, now)


@compiled
def join(R: Any, M: Any, k: int, now: int) -> None:
    """Page k takes a leaf; R[k].pos is its number."""
    leaf = M[FREE] - 1
    if leaf >= 0:
        M[FREE] = M[SCRATCH + 2 * (M[SIZE] + leaf) + 1] - NEVER
    else:
        if M[NUM] == M[SIZE]:
            grow(R, M, now)
        leaf = M[NUM]
        M[NUM] += 1
    R[k].pos = leaf
    M[SCRATCH + 2 * (M[SIZE] + leaf)] = k
    renew(R, M, k, now)


@compiled
def renew(R: Any, M: Any, k: int, now: int) -> None:
    """Page k, which has a leaf, has another next use, size or key."""
    settle_leaf(R, M, M[SIZE] + R[k].pos, now)
    replay_up(R, M, k, R[k].pos, now)


@compiled
def leave(R: Any, M: Any, k: int, now: int) -> None:
    """Page k gives up its leaf."""
    leaf = R[k].pos
    M[SCRATCH + 2 * (M[SIZE] + leaf)] = -1
    M[SCRATCH + 2 * (M[SIZE] + leaf) + 1] = NEVER + M[FREE]  # a time that never comes, and the next free leaf
    M[FREE] = leaf + 1
    replay_up(R, M, k, leaf, now)


@compiled
def hide(R: Any, M: Any, k: int, now: int) -> None:
    """Keeps page k's leaf but takes it out of every match."""
    M[SCRATCH + 2 * (M[SIZE] + R[k].pos)] = -1
    M[SCRATCH + 2 * (M[SIZE] + R[k].pos) + 1] = NEVER
    replay_up(R, M, k, R[k].pos, now)


@compiled
def first(R: Any, M: Any, now: int) -> int:
    """The page with the greatest score, -1 when there is none. Replays the matches whose time has come."""
    if M[SIZE] == 0:
        return -1
    node = 1
    while M[SCRATCH + 3] <= now or node > 1:
        if node < M[SIZE] and M[SCRATCH + 4 * node + 1] <= now:
            node = 2 * node
        elif node < M[SIZE] and M[SCRATCH + 4 * node + 3] <= now:
            node = 2 * node + 1
        else:
            if node < M[SIZE]:
                play(R, M, node, now)
            else:
                settle_leaf(R, M, node, now)
            node = max(node >> 1, 1)
    return int(M[SCRATCH + 2])


@compiled
def first_free(R: Any, M: Any, now: int) -> int:
    """The greatest score among pages that are not leased. Leased ones are hidden, linked by `next`, until `restore`."""
    k = first(R, M, now)
    while k >= 0 and R[k].lease > 0:
        hide(R, M, k, now)
        R[k].next = M[ASIDE] - 1
        M[ASIDE] = k + 1
        k = first(R, M, now)
    return k


@compiled
def restore(R: Any, M: Any, now: int) -> None:
    """Shows what `first_free` hid; a policy's `on_chosen`."""
    k = M[ASIDE] - 1
    M[ASIDE] = 0
    while k >= 0:
        M[SCRATCH + 2 * (M[SIZE] + R[k].pos)] = k
        renew(R, M, k, now)
        k = R[k].next
