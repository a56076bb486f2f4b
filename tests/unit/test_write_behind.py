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
