"""Write-behind copies each page down once, and then rests."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from tiercache import AccessPlan, PageKey, TierStore, open_store
from tiercache.plan import Access

PAGE = 4096


def _key(number: int) -> PageKey:
    return PageKey(bytes([number]) * 32, 0, "key")


def _moved(store: TierStore) -> int:
    return sum(store.stats().bytes_moved.values())


@pytest.mark.parametrize("planned", [False, True])
@pytest.mark.parametrize("host_pages", [1, 2, 8])
@pytest.mark.parametrize("on_disk", [False, True])
def test_pages_do_not_push_each_other_out_for_ever(
    tmp_path: Path, planned: bool, host_pages: int, on_disk: bool
) -> None:
    """Two nearly full tiers: a copy written behind must not cost another page its own, or copying never ends.

    With a plan the pages that the device would evict first are those that the host would evict first as well.
    """
    disk = {"disk": tmp_path, "disk_capacity": "64MiB"} if on_disk else {}
    host, staging = host_pages * (PAGE + 512), 4096
    with open_store(16 * PAGE, host=host + staging, staging=staging, **disk) as store:
        pages = 16 + (2 * host_pages if on_disk else 0)
        if planned:
            store.follow(
                AccessPlan([Access(o, _key(n), PAGE) for o in ("put", "read") for n in range(pages)])
            )
        for number in range(pages):
            store.put(_key(number), torch.full((PAGE,), number, dtype=torch.uint8))
        time.sleep(0.1)
        settled = _moved(store)
        time.sleep(0.1)
        assert _moved(store) == settled, "copies go on although nothing is asked of the store"
        assert settled <= 3 * pages * PAGE
        store.check_integrity()


def _settled(store: TierStore, want: int) -> int:
    """Bytes that went to the disk once they are as many as wanted, or nothing more comes."""

    def written() -> int:
        return sum(size for way, size in store.stats().bytes_moved.items() if way.endswith("->disk"))

    deadline = time.monotonic() + 10
    while time.monotonic() < deadline and written() < want:
        time.sleep(0.01)
    time.sleep(0.1)
    return written()


@pytest.mark.parametrize("policy", ["planned", "lru", "sieve"])
@pytest.mark.parametrize("pages", [11, 13, 16])
def test_what_a_plan_will_push_out_is_written_while_there_is_room(
    tmp_path: Path, pages: int, policy: str
) -> None:
    """A drive that rests while host memory fills is waited for later. No page more is written than must go."""
    on_device, in_host, put = 2, 9, 8
    plan = AccessPlan([Access(o, _key(n), PAGE) for o in ("put", "read") for n in range(pages)])
    host = in_host * (PAGE + 512)
    with open_store(
        on_device * PAGE, host=host + 4096, staging=4096, disk=tmp_path, disk_capacity="64MiB", policy=policy
    ) as store:
        for followed in (None, plan):
            store.follow(followed)
            for number in range(put):
                store.put(_key(number), torch.full((PAGE,), number, dtype=torch.uint8))
            must_go = max(0, pages - on_device - in_host) * PAGE if followed else 0
            # One less for records are smaller, and one that was on its way when the last came.
            assert must_go - 2 * PAGE <= _settled(store, must_go - 2 * PAGE) <= must_go
            for number in range(put):
                store.discard([_key(number)])
        store.check_integrity()


@pytest.mark.parametrize("host_pages", [0, 4])
def test_what_goes_to_a_drive_goes_from_the_device_too(tmp_path: Path, host_pages: int) -> None:
    """The first pages, which are used last, are on disk long before the device is full."""
    on_device, put, pages = 16, 6, 16 + host_pages + 4
    plan = AccessPlan([Access("put", _key(n), PAGE) for n in range(pages)])
    for n in reversed(range(pages)):
        plan.add("read", _key(n), PAGE)
    host = {"host": host_pages * (PAGE + 512) + 4096} if host_pages else {}
    with open_store(on_device * PAGE, staging=4096, disk=tmp_path, disk_capacity="64MiB", **host) as store:
        store.follow(plan)
        for number in range(put):
            store.put(_key(number), torch.full((PAGE,), number, dtype=torch.uint8))
        assert 3 * PAGE <= _settled(store, 4 * PAGE) <= 4 * PAGE
        assert not store.stats().bytes_moved.get("device->host", 0)
        for number in range(put):
            with store.read(_key(number)) as lease:
                assert (lease.tensor == number).all()
        store.check_integrity()


def test_sums_stay_while_pages_that_are_on_the_drive_can_go(tmp_path: Path) -> None:
    """Inputs, then sums of their size, then both from the last to the first, as in a training step. Only as many bytes
    are written as the tiers above lack, and no sum among them: what lies on the drive already is dropped first.
    """
    count, on_device, in_host = 12, 8, 8
    inputs, sums = ([PageKey(bytes([n]) * 32, 0, kind) for n in range(count)] for kind in ("key", "grad_key"))
    plan = AccessPlan([Access("put", key, PAGE) for key in inputs])
    for key in reversed(sums):
        plan.add("accumulate", key, PAGE)
    for n in reversed(range(count)):
        plan.add("take", inputs[n], PAGE)
        plan.add("take", sums[n], PAGE)
    host = in_host * (PAGE + 512) + 4096
    with open_store(on_device * PAGE, host=host, staging=4096, disk=tmp_path, disk_capacity="64MiB") as store:
        store.follow(plan)
        for n, key in enumerate(inputs):
            store.put(key, torch.full((PAGE // 4,), float(n)))
        lacks = (2 * count - on_device - in_host) * PAGE
        assert _settled(store, lacks) >= lacks - 2 * PAGE
        for key in reversed(sums):
            store.accumulate(key, torch.ones(PAGE // 4))
        assert _settled(store, 0) <= lacks + 2 * PAGE
        for n in reversed(range(count)):
            assert (store.take(inputs[n]) == float(n)).all()
            assert (store.take(sums[n]) == 1.0).all()
        store.check_integrity()


def test_live_bytes_are_what_a_plan_holds_after_each_access() -> None:
    kept, summed, dropped = _key(0), _key(1), _key(2)
    plan = AccessPlan()
    plan.add("put", kept, 10)
    plan.add("put", dropped, 100, recompute_s=1.0)
    plan.add("accumulate", summed, 20)
    plan.add("accumulate", summed, 20)
    plan.add("read", kept, 10)
    plan.add("take", summed, 20)
    plan.add("discard", kept)
    assert plan.live_bytes() == [10, 10, 30, 30, 30, 10, 0]
