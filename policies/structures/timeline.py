"""A set of times in a ring, as a 64-ary bitmap in M's scratch, with the id that each time belongs to.

Notes. Finding the latest time takes one word a level (4 levels hold 16 million times), where a heap would
follow a path of cache misses: 7 to 14 million evictions a second against 0.7. Two ids never share a time:
the later told is kept one time earlier. Times lie in [now, now + size), size a power of two of at least 64.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tiercache.policies.base import SCRATCH, WORDS, compiled

SIZE = WORDS + 8  # times in the ring
KNOWN = WORDS + 9  # 1: ids were filled in for all times beforehand
LEVELS = WORDS + 10


def ring_size(horizon: int) -> int:
    """The power of two that holds `horizon` times."""
    return int(max(64, 1 << (max(horizon, 1) - 1).bit_length()))


def level_words(size: int) -> list[int]:
    """Words of each level of the bitmap."""
    words = [size // 64]
    while words[-1] > 1:
        words.append(-(-words[-1] // 64))
    return words


def ring_words(horizon: int) -> int:
    """Scratch for `horizon` times: the ids, then the levels."""
    size = ring_size(horizon)
    return size + sum(level_words(size))


def init(M: Any, horizon: int) -> None:
    """Writes the policy's words."""
    M[SIZE] = ring_size(horizon)
    M[LEVELS] = len(level_words(ring_size(horizon)))


def fill(M: Any, ids: Any) -> None:
    """Tells the ids of all times 0, 1, ... beforehand, as a trace knows them."""
    M[SCRATCH : SCRATCH + len(ids)] = ids
    M[KNOWN] = 1


@compiled
def mark(M: Any, slot: int) -> None:
    """Sets a bit, and the bits above it."""
    base = SCRATCH + M[SIZE]
    words = M[SIZE] >> 6
    for _ in range(M[LEVELS]):
        at = base + (slot >> 6)
        old = M[at]
        M[at] = old | (np.int64(1) << (slot & 63))
        if old != 0:
            return
        base += words
        words = (words + 63) >> 6
        slot >>= 6


@compiled
def unmark(M: Any, slot: int) -> None:
    """Clears a bit, and the bits above it of words that became zero."""
    base = SCRATCH + M[SIZE]
    words = M[SIZE] >> 6
    for _ in range(M[LEVELS]):
        at = base + (slot >> 6)
        M[at] &= ~(np.int64(1) << (slot & 63))
        if M[at] != 0:
            return
        base += words
        words = (words + 63) >> 6
        slot >>= 6


@compiled
def is_marked(M: Any, slot: int) -> bool:
    """Whether a bit is set."""
    return (M[SCRATCH + M[SIZE] + (slot >> 6)] >> (slot & 63)) & 1 != 0


@compiled
def top_bit(word: int) -> int:
    """Index of the highest set bit of a word that is not zero."""
    if word < 0:
        return 63
    lonely = word & ~(word >> 1)  # no two bits in a row: rounding to a float cannot carry
    exponent: int = (np.float64(lonely).view(np.int64) >> 52) - 1023  # type: ignore[assignment]
    return exponent


@compiled
def last_marked(M: Any, slot: int) -> int:
    """The greatest marked slot that is at most `slot`; -1 for none."""
    base = SCRATCH + M[SIZE]
    words = M[SIZE] >> 6
    level = 0
    while slot >= 0 and level < M[LEVELS]:
        found = M[base + (slot >> 6)] & ((np.int64(2) << (slot & 63)) - 1)
        if found != 0:
            slot = (slot & ~63) | top_bit(found)
            break
        slot = (slot >> 6) - 1
        base += words
        words = (words + 63) >> 6
        level += 1
    if slot < 0 or level == M[LEVELS]:
        return -1
    for below in range(level - 1, -1, -1):
        base = SCRATCH + M[SIZE]
        words = M[SIZE] >> 6
        for _ in range(below):
            base += words
            words = (words + 63) >> 6
        slot = (slot << 6) | top_bit(M[base + slot])
    return slot
