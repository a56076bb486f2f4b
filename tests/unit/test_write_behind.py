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
    """Bytes that went from host memory to the disk once they are as many as wanted, or nothing more comes."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline and store.stats().bytes_moved.get("host->disk", 0) < want:
        time.sleep(0.01)
    time.sleep(0.1)
    return store.stats().bytes_moved.get("host->disk", 0)


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
