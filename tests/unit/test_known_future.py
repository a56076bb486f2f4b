"""What a plan is good for beyond the order of accesses: when copies start, what is worth keeping, and overlap."""

from __future__ import annotations

import dense
import pytest
from pages import PAGE, grad, is_page, key, page, small_store
from plain_model import build_plain
from shared_time import SharedTime
from trees import make_case

from tiercache import AccessPlan, open_store
from tiercache.pace import Pace
from tiercache.runtime import BranchReplay, prefix_attention
from tiercache.runtime.step import Keeping
from tiercache.testing import FakeClock, FaultTier, LateDevice, MemoryTier


def reads(*numbers):
    plan = AccessPlan()
    for n in numbers:
        plan.add("read", key(n), PAGE)
    return plan


# When a copy starts


def test_pages_come_up_no_earlier_than_they_need_to():
    """Accesses are a second apart and copies take no time: more than a few pages ahead would be too early."""
    clock = FakeClock()
    with small_store(device=128, host=None, disk=512, clock=clock) as store:
        for n in range(256):
            store.put(key(n), page(n))
        store.flush()
        store.follow(reads(*range(256), *range(256)))
        ahead, misses = [], []
        for n in (*range(256), *range(256)):
            store.flush()
            clock.advance(1.0)
            before = store.stats().misses
            with store.read(key(n)) as lease:
                assert is_page(lease.tensor, n)
            misses.append(store.stats().misses - before)
            places = [entry.places[0] for entry in store._books.by_id if entry is not None]
            ahead.append(sum(place is not None and place.ahead for place in places))
        assert max(ahead[256:]) <= 17, "held room long before it was needed"
        assert sum(misses[256:]) <= 2, "came too late"
        assert store.stats().deviations == 0


def test_the_start_follows_from_measured_speeds():
    pace = Pace()
    assert pace.is_due(10_000, 1, 1 << 20), "nothing is known yet"
    for access in range(200):
        pace.note_access(access * 0.001)
    pace.note_copy(1, 0, 1_000_000, 0.1)  # 10 MB/s: a window of 1 MB takes 0.1 s, twice that is 200 accesses
    assert pace.is_due(190, 1, 1_000_000)
    assert not pace.is_due(210, 1, 1_000_000)
    assert pace.is_due(16, 1, 1), "what is near is always due"
    for access in range(64):  # a burst counts as the pace of the run
        pace.note_access(0.2 + access * 1e-5)
    assert pace.is_due(10_000, 1, 1_000_000)


# What is worth keeping


def again(seconds, count=12):
    """Puts of pages that take so long to compute again, then a take of each."""
    plan = AccessPlan()
    for n in range(count):
        plan.add("put", key(n), PAGE, seconds)
    for n in reversed(range(count)):
        plan.add("take", key(n), PAGE)
    return plan


@pytest.mark.parametrize(("seconds", "kept"), [(1e-12, False), (1e6, True), (None, True)])
def test_a_page_that_is_cheaper_to_compute_again_is_dropped_and_not_moved(seconds, kept):
    with small_store(device=4, host=4, disk=64) as store:
        store.follow(again(seconds))
        for n in range(12):
            store.put(key(n), page(n))
        store.flush()
        found = [store.take(key(n)) for n in reversed(range(12))]
        stats = store.stats()
        assert stats.deviations == 0
        assert [f is not None for f in found].count(True) == (12 if kept else 4)
        assert stats.dropped == (0 if kept else 8)
        assert bool(stats.bytes_moved) == kept
        assert all(is_page(f, n) for f, n in zip(found, reversed(range(12)), strict=True) if f is not None)


def test_pages_that_must_be_kept_outlive_those_that_need_not():
    with small_store(device=4, host=None, disk=64) as store:
        plan = AccessPlan()
        for n in range(12):
            plan.add("put", key(n), PAGE, 1e-12 if n % 2 else None)
        for n in range(12):
            plan.add("take", key(n), PAGE)
        store.follow(plan)
        for n in range(12):
            store.put(key(n), page(n))
        for n in range(12):
            taken = store.take(key(n))
            assert n % 2 or is_page(taken, n)
        assert store.stats().dropped > 0


def test_attention_that_was_dropped_is_computed_again_and_the_gradient_is_exact(monkeypatch):
    model, case = build_plain(prefix_attention), make_case("chain_of_5")
    want = dense.weighted_gradients(model, case.rows)
    model.zero_grad(set_to_none=True)
    with open_store(16_000, host="1MiB") as store:
        replay = BranchReplay(model, store, check_model=False, prefix_activations="auto", **case.options)

        def choose(tree, *_):
            inner = [node.index for node in tree.nodes if not node.is_leaf]
            return dict.fromkeys(inner, Keeping("attention", again_s=1e-12))

        monkeypatch.setattr(replay.engine.chooser, "choose", choose)
        replay.backward(case.rows, dense.weighted_sum)
        assert store.stats().dropped > 0
        assert store.stats().pages == 0
    assert dense.relative_l2(dense.gradients(model), want) < 1e-12


# Where sums live


def test_sums_are_added_to_in_host_memory_without_a_round_trip():
    with small_store(device=2, host=16, disk=64) as store:
        for n in range(12):
            store.accumulate(grad(n), page(n))
        store.flush()
        assert {store._books.table[grad(n)].source() for n in range(12)} == {0, 1}
        before = store.stats().bytes_moved
        for _ in range(5):
            for n in range(12):
                store.accumulate(grad(n), page(n))
        assert store.stats().bytes_moved == before, "a sum was moved in order to be added to"
        for n in range(12):
            assert is_page(store.take(grad(n)), 6.0 * n)
        assert "disk" not in " ".join(store.stats().bytes_moved)


def test_sums_on_a_late_device_stay_in_host_memory_too():
    with small_store(device=2, host=16, disk=64, accelerator=LateDevice()) as store:
        for turn in range(4):
            for n in range(12):
                store.accumulate(grad(n), page(n + turn))
        moved = store.stats().bytes_moved
        assert moved.get("host->device", 0) == 0
        assert not any("disk" in direction for direction in moved)
        assert is_page(store.take(grad(7)), 4.0 * 7 + 6)


def test_the_disk_takes_sums_only_when_host_memory_is_full():
    disk = MemoryTier(64 * PAGE, name="disk")
    with small_store(device=2, host=4, disk=disk) as store:
        for n in range(6):
            store.accumulate(grad(n), page(n))
        assert disk.used_bytes == 0
        for n in range(6, 12):
            store.accumulate(grad(n), page(n))
        assert disk.used_bytes > 0
        for n in range(12):
            assert is_page(store.take(grad(n)), n)


# Overlap


def follows(look_ahead, late=False):
    """Seconds that a run took whose compute takes 0.02 a page and whose transfers 0.016, and both their sums."""
    time, compute_s, transfer_s = SharedTime(), 0.02, 0.0
    warm = 16  # the first accesses push out what the puts left, which the plan does not name
    transfers = []

    def read_takes_time(called, _):
        if called == "read" and transfer_s:
            transfers.append(transfer_s)
            time.transfer(transfer_s)

    disk = FaultTier(MemoryTier(512 * PAGE, name="disk"), read_takes_time)
    options = {"accelerator": LateDevice()} if late else {}
    with small_store(
        device=8, host=8 if late else None, disk=disk, transfer_threads=1, clock=time, **options
    ) as store:
        threads = store._parts.threads
        time.quiet = lambda: not (threads._up or threads._running)
        for n in range(60):
            store.put(key(n), page(n))
        store.flush()
        numbers = [n for n in range(60) if store._books.table[key(n)].source() == store._books.last]
        assert len(numbers) > 40
        transfer_s = 0.016
        if look_ahead:
            store.follow(reads(*numbers))
        time.compute(0.0)
        for at, n in enumerate(numbers):
            if at == warm:
                begin_s, begin_stall_s, begin_transfers = time.now(), store.stats().stall_s, len(transfers)
            with store.read(key(n)) as lease:
                time.compute(compute_s)
                assert late or is_page(lease.tensor, n)
        assert not look_ahead or store.stats().prefetches_used > 0.8 * len(numbers)
        stall_s = store.stats().stall_s - begin_stall_s
        return (
            time.now() - begin_s,
            compute_s * len(numbers[warm:]),
            sum(transfers[begin_transfers:]),
            stall_s,
        )


@pytest.mark.parametrize("late", [False, True])
def test_a_slow_disk_runs_beside_compute(late):
    """Transfers take 0.8 of compute: with look-ahead the run takes little more than the longer of the two."""
    took_s, compute_s, transfers_s, _ = follows(look_ahead=True, late=late)
    assert transfers_s > 0.5 * compute_s, "nothing to overlap"
    assert took_s <= 1.1 * max(compute_s, transfers_s)


def test_without_look_ahead_the_same_disk_is_waited_for():
    """The test above would show nothing if reads were not waited for, and stalls not counted."""
    took_s, compute_s, transfers_s, stall_s = follows(look_ahead=False)
    assert took_s == pytest.approx(compute_s + transfers_s)
    assert stall_s == pytest.approx(transfers_s)
