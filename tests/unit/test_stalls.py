"""Every operation that makes its caller wait says for how long, in `stall_s` or `put_stall_s`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest
import torch

from tiercache import PageKey, TierStore, open_store
from tiercache.testing import FaultTier, MemoryTier

WAIT_S = 0.05
PAGE = 1 << 16  # bytes
BUDGET = 4 * PAGE


def key(n: int) -> PageKey:
    return PageKey(bytes(32), n, "page")


def page(value: float = 1.0) -> torch.Tensor:
    return torch.full((PAGE // 4,), value)


class Slow:
    """A tier that keeps its callers waiting while it is told to."""

    def __init__(self) -> None:
        self.on = False

    def __call__(self, called: str, num_bytes: int) -> None:
        if self.on and called in {"read", "write"}:
            time.sleep(WAIT_S)


@pytest.fixture
def slow() -> Slow:
    return Slow()


@pytest.fixture
def store(slow: Slow) -> Iterator[TierStore]:
    disk = FaultTier(MemoryTier(1 << 24, name="disk"), slow)
    with open_store(device=BUDGET, disk=disk, policy="lru") as opened:
        yield opened


def fill(store: TierStore) -> None:
    """Leaves no room on the device."""
    for n in range(BUDGET // PAGE):
        store.put(key(100 + n), page())


def push_down(store: TierStore) -> None:
    """Leaves the page 0 on the disk alone."""
    for n in range(3 * BUDGET // PAGE):
        store.put(key(200 + n), page())
        store.flush()


def put_below(store: TierStore) -> None:
    store.put(key(0), page())
    push_down(store)


def sum_below(store: TierStore) -> None:
    store.accumulate(key(0), page())
    push_down(store)


def read(store: TierStore) -> None:
    with store.read(key(0)) as lease:
        assert torch.equal(lease.tensor, page())


def take(store: TierStore) -> None:
    taken = store.take(key(0))
    assert taken is not None
    assert torch.equal(taken, page())


WAITS: dict[str, tuple[Callable[[TierStore], None], Callable[[TierStore], None], str]] = {
    "read": (put_below, read, "stall_s"),
    "take": (put_below, take, "stall_s"),
    "take a sum": (sum_below, take, "stall_s"),
    "put": (fill, lambda store: store.put(key(0), page()), "put_stall_s"),
    "begin a sum": (fill, lambda store: store.accumulate(key(0), page()), "put_stall_s"),
    "raise a sum": (sum_below, lambda store: store.accumulate(key(0), page()), "put_stall_s"),
}


@pytest.mark.parametrize("name", WAITS)
def test_a_wait_is_counted_where_it_belongs(store: TierStore, slow: Slow, name: str) -> None:
    prepare, act, field = WAITS[name]
    slow.on = prepare is fill  # what makes room is not written ahead in the meantime
    prepare(store)
    before = store.stats()
    slow.on = True
    start_s = time.perf_counter()
    act(store)
    elapsed_s = time.perf_counter() - start_s
    slow.on = False
    after = store.stats()
    counted = {f: getattr(after, f) - getattr(before, f) for f in ("stall_s", "put_stall_s")}
    assert WAIT_S / 2 <= counted.pop(field) <= elapsed_s
    assert list(counted.values()) == [0.0]


def test_what_is_there_costs_no_wait(store: TierStore, slow: Slow) -> None:
    slow.on = True
    store.put(key(0), page())
    store.accumulate(key(1), page())
    store.accumulate(key(1), page())
    read(store)
    take(store)
    stats = store.stats()
    assert (stats.stall_s, stats.put_stall_s) == (0.0, 0.0)
