"""Why slots are exact extents and not buddy blocks: on pages of a model's sizes they never hold fewer bytes."""

from __future__ import annotations

import random

import pytest

from tiercache import _core
from tiercache.errors import TierFullError

PAGE = 4096
CAPACITY_PAGES = 60 << 8  # 60 MiB


class TrimmedBuddy:
    """A binary buddy whose blocks give back what the page does not need, as smaller buddies."""

    def __init__(self, num_pages: int) -> None:
        self.free: dict[int, set[int]] = {order: set() for order in range(20)}
        self._give(0, num_pages)

    def _give(self, begin: int, count: int) -> None:
        """Free pages, cut into aligned blocks; buddies join."""
        while count:
            order = min((begin & -begin).bit_length() - 1 if begin else 19, count.bit_length() - 1)
            self._release(begin, order)
            begin, count = begin + (1 << order), count - (1 << order)

    def _release(self, begin: int, order: int) -> None:
        while order < 19 and (begin ^ 1 << order) in self.free[order]:
            self.free[order].remove(begin ^ 1 << order)
            begin &= ~(1 << order)
            order += 1
        self.free[order].add(begin)

    def take(self, count: int) -> int | None:
        wanted = (count - 1).bit_length()
        for order in range(wanted, 20):
            if self.free[order]:
                begin = min(self.free[order])
                self.free[order].remove(begin)
                self._give(begin + count, (1 << order) - count)
                return begin
        return None

    def give(self, begin: int, count: int) -> None:
        self._give(begin, count)


def arena_holds(sizes: list[int], seed: int, steps: int) -> float:
    arena = _core.Arena(CAPACITY_PAGES * PAGE, touch_threads=0)

    def take(count: int) -> int | None:
        try:
            return arena.reserve(count * PAGE)
        except TierFullError:
            return None

    return held_when_refusing(take, lambda offset, count: arena.release(offset), sizes, seed, steps)


def buddy_holds(sizes: list[int], seed: int, steps: int) -> float:
    buddy = TrimmedBuddy(CAPACITY_PAGES)
    return held_when_refusing(buddy.take, buddy.give, sizes, seed, steps)


def held_when_refusing(take, give, sizes, seed, steps) -> float:
    """Mean share of the memory that is held at the instants when a page finds no room, and one gives way for it."""
    rng, live, shares = random.Random(seed), [], []
    for _ in range(steps):
        count = rng.choice(sizes)
        while (begin := take(count)) is None:
            shares.append(sum(size for _, size in live) / CAPACITY_PAGES)
            give(*live.pop(rng.randrange(len(live))))
        live.append((begin, count))
    return sum(shares) / len(shares)


@pytest.mark.parametrize(
    ("sizes", "margin"),
    [
        pytest.param([5 << 8], 0.3, id="one size that is no power of two"),
        pytest.param([1 << 8], 0.0, id="a power of two"),
        pytest.param([17, 68, 1 << 8], 0.1, id="pages, layer inputs and sums of one model"),
        pytest.param([3 << 8, 5 << 8, 7 << 8], 0.1, id="three models"),
        pytest.param(list(range(8, 1400)), 0.15, id="compressed pages of any size"),
    ],
)
def test_extents_hold_at_least_what_trimmed_buddies_hold(sizes, margin):
    ours, theirs = arena_holds(sizes, 1, 1500), buddy_holds(sizes, 1, 1500)
    assert ours >= theirs + margin, (ours, theirs)
    assert ours >= 0.75
