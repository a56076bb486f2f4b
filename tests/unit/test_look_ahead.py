"""Look-ahead of a plan that was known before its pages were."""

from __future__ import annotations

import time
from pathlib import Path

import torch

from tiercache import AccessPlan, PageKey, open_store
from tiercache.plan import Access

PAGE = 1 << 16
PAGES = 24


def _key(number: int) -> PageKey:
    return PageKey(bytes([number]) * 32, 0, "key")


def test_pages_that_are_put_later_are_brought_up_as_well(tmp_path: Path) -> None:
    """A step follows its plan before the first capture: no page of it exists then."""
    accesses = [Access(o, _key(n), PAGE) for o in ("put", "read", "read") for n in range(PAGES)]
    with open_store(6 * PAGE, host=6 * (PAGE + 4096), disk=tmp_path, disk_capacity="64MiB") as store:
        store.follow(AccessPlan(accesses))
        for number in range(PAGES):
            store.put(_key(number), torch.full((PAGE,), number, dtype=torch.uint8))
        for _ in range(2):
            for number in range(PAGES):
                with store.read(_key(number)) as lease:
                    assert int(lease.tensor[-1]) == number
                time.sleep(0.002)
        stats = store.stats()
        assert stats.deviations == 0
        assert stats.prefetches_used >= PAGES // 4
        store.check_integrity()
