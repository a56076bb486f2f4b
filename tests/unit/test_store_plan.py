"""Plans, hints, write-behind and the eviction policies, as the store uses them."""

import random
import threading
import time

import pytest
from pages import PAGE, grad, is_page, key, page, small_store

from tiercache import AccessPlan
from tiercache.testing import FaultTier, MemoryTier


def plan_of(*accesses):
    plan = AccessPlan()
    for operation, name in accesses:
        plan.add(operation, name, PAGE)
    return plan


def carry_out(store, plan, pause_s=0.0):
    for access in plan.accesses:
        number = int.from_bytes(access.key.node[:4], "big")
        if access.operation == "put":
            store.put(access.key, page(number))
        elif access.operation == "read":
            with store.read(access.key) as lease:
                assert is_page(lease.tensor, number)
        elif access.operation == "accumulate":
            store.accumulate(access.key, page(number))
        elif access.operation == "take":
            store.take(access.key)
        else:
            store.discard([access.key])
        time.sleep(pause_s)


def test_the_next_reads_are_on_the_device_before_they_are_made():
    with small_store(device=8, host=None, disk=64) as store:
        for n in range(24):
            store.put(key(n), page(n))
        store.flush()
        plan = plan_of(*[("read", key(n)) for n in range(24)] * 2)
        store.follow(plan)
        before = store.stats()
        for access in plan.accesses:
            store.flush()
            with store.read(access.key):
                pass
        after = store.stats()
        assert after.deviations == 0
        assert after.misses - before.misses <= 4, "look-ahead should hide nearly every read"
        assert after.prefetches_used >= 24


def test_look_ahead_brings_sums_up_to_host_memory():
    disk = MemoryTier(64 * PAGE, name="disk")
    with small_store(device=2, host=4, disk=disk) as store:
        for n in range(12):
            store.accumulate(grad(n), page(n))
        low = [n for n in range(12) if store._books.table[grad(n)].source() == 2]
        for n in range(12):
            if n not in low:
                store.take(grad(n))
        store.follow(plan_of(*[("accumulate", grad(n)) for n in low[:3]]))
        store.flush()
        assert [store._books.table[grad(n)].source() for n in low[:3]] == [1, 1, 1]
        store.check_integrity()


def test_planned_eviction_beats_lru_on_a_scan_back_and_forth():
    order = [*range(12), *reversed(range(12))] * 3
    moved = {}
    for policy in ("lru", "planned"):
        with small_store(device=6, host=None, disk=64, policy=policy) as store:
            for n in range(12):
                store.put(key(n), page(n))
            store.flush()
            plan = plan_of(*[("read", key(n)) for n in order])
            store.follow(plan)
            before = store.stats().bytes_moved.get("disk->device", 0)
            carry_out(store, plan)
            store.flush()
            moved[policy] = store.stats().bytes_moved["disk->device"] - before
    assert moved["planned"] <= moved["lru"]


def test_a_run_that_leaves_its_plan_is_counted_and_served():
    rng = random.Random(1)
    accesses = [("read", key(rng.randrange(40))) for _ in range(200)]
    with small_store(device=4, host=4, disk=64) as store:
        for n in range(40):
            store.put(key(n), page(n))
        store.follow(plan_of(*accesses))
        swapped = list(accesses)
        swapped[20], swapped[21] = ("read", key(11)), ("read", key(10))
        del swapped[50:60]
        swapped.insert(100, ("put", key(3)))
        with store.record_accesses() as made:
            carry_out(store, plan_of(*swapped))
        assert made == swapped
        assert 3 <= store.stats().deviations <= 20
        store.follow(plan_of(("take", key(99))))
        carry_out(store, plan_of(*accesses[:50]))
        assert store.stats().deviations >= 50
        store.follow(None)
        deviations = store.stats().deviations
        carry_out(store, plan_of(*accesses[:50]))
        assert store.stats().deviations == deviations
        store.flush()
        store.check_integrity()


def test_what_a_plan_says_and_what_a_run_does_can_be_compared():
    plan = plan_of(
        ("put", key(1)), ("read", key(1)), ("accumulate", grad(1)), ("take", grad(1)), ("discard", key(1))
    )
    with small_store() as store:
        store.follow(plan)
        with store.record_accesses() as made:
            carry_out(store, plan)
        assert made == [(access.operation, access.key) for access in plan.accesses]
        assert store.stats().deviations == 0
        store.put(key(5), page(5))
        assert len(made) == len(plan), "the record ended with its block"


def test_a_hint_brings_pages_up_within_free_room_and_evicts_nothing_that_needs_a_write():
    with small_store(device=4, host=None, disk=64) as store:
        for n in range(8):
            store.put(key(n), page(n))
        store.flush()
        store.discard([key(n) for n in range(4, 8)])
        low = [n for n in range(4) if store._books.table[key(n)].source() == 1]
        store.prefetch([key(n) for n in low] + [key(99)])
        store.flush()
        before = store.stats()
        for n in low:
            with store.read(key(n)) as lease:
                assert is_page(lease.tensor, n)
        after = store.stats()
        assert after.hits - before.hits == len(low)
        assert after.prefetches_used - before.prefetches_used == len(low)


def test_nothing_is_written_while_the_budget_has_room():
    with small_store(device=16, host=16, disk=64) as store:
        for n in range(11):
            store.put(key(n), page(n))
        store.flush()
        assert store.stats().bytes_moved == {}


def test_a_copy_below_is_dropped_and_not_written_again():
    with small_store(device=2, host=None, disk=64, transfer_threads=1) as store:
        for n in range(6):
            store.put(key(n), page(n))
        store.flush()
        for _ in range(5):
            for n in range(6):
                store.read(key(n)).release()
        store.flush()
        assert store.stats().bytes_moved["device->disk"] <= 6 * PAGE


def test_victims_go_down_beside_compute():
    wrote = []
    disk = FaultTier(
        MemoryTier(64 * PAGE, name="disk"),
        lambda called, num_bytes: (
            wrote.append(threading.current_thread().name) if called == "write" else None
        ),
    )
    with small_store(device=8, host=None, disk=disk) as store:
        for n in range(32):
            store.put(key(n), page(n))
            store.flush()
        assert store.stats().put_stall_s < 1
    assert wrote
    assert all(name.startswith("tiercache-transfer") for name in wrote)


@pytest.mark.parametrize("policy", ["lru", "planned"])
def test_every_page_survives_a_working_set_far_above_the_budget(policy):
    with small_store(device=3, host=3, disk=256, policy=policy) as store:
        for n in range(200):
            store.put(key(n), page(n))
        plan = plan_of(*[("read", key(n)) for n in range(200)])
        store.follow(plan)
        carry_out(store, plan)
        store.check_integrity()
