"""Every tier keeps the contract of tiers/base.py."""

from __future__ import annotations

import hashlib
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from tiercache.errors import ConfigError, TierFullError
from tiercache.tiers import create_tier
from tiercache.tiers.base import PageMeta, Slot, Tier
from tiercache.tiers.disk import DiskTier
from tiercache.tiers.host import HostTier

CAPACITY = 4 << 20


DISKS = {
    "disk": {},
    "disk-threads": {"engine": "threads"},
    "disk-buffered": {"direct": False},
    "disk-power": {"durability": "power"},
}


@pytest.fixture(params=["host", *DISKS])
def tier(request, tmp_path):
    made = (
        HostTier(CAPACITY)
        if request.param == "host"
        else DiskTier(tmp_path, CAPACITY, **DISKS[request.param])
    )
    yield made
    made.check_integrity()
    made.close()
    made.close()


def page(seed: int, num_bytes: int) -> tuple[np.ndarray, PageMeta]:
    data = np.random.default_rng(seed).integers(0, 256, num_bytes, dtype=np.uint8)
    digest = hashlib.blake2b(str(seed).encode(), digest_size=32).digest()
    return data, PageMeta(digest, bytes(32), "uint8", (num_bytes,), "raw", num_bytes, num_bytes)


def test_a_tier_is_made_by_name(tmp_path):
    with pytest.raises(ConfigError, match="create_tier"):
        create_tier("tape")
    create_tier("disk", tmp_path, CAPACITY).close()


def put(tier: Tier, seed: int, num_bytes: int) -> tuple[Slot, np.ndarray, PageMeta]:
    data, meta = page(seed, num_bytes)
    slot = tier.reserve(num_bytes)
    tier.write(slot, data, meta)
    return slot, data, meta


@pytest.mark.parametrize("num_bytes", [1, 63, 4095, 4096, 4097, 100_000, (1 << 20) + 3, 2 << 20])
def test_reads_what_was_written(tier, num_bytes):
    slot, data, meta = put(tier, num_bytes, num_bytes)
    assert tier.used_bytes >= num_bytes
    for offset in (0, 1):  # aligned or not
        out = np.zeros(num_bytes + offset, np.uint8)[offset:]
        tier.read(slot, out, meta)
        np.testing.assert_array_equal(out, data)
    tier.free(slot)
    assert tier.used_bytes == 0


def test_full_tier_says_so_and_changes_nothing(tier):
    slots = []
    with pytest.raises(TierFullError) as full:
        for _ in range(10_000):
            slots.append(tier.reserve(100_000))
    assert "reserve of 100000 bytes" in str(full.value)
    assert slots
    used = tier.used_bytes
    assert used <= tier.capacity_bytes
    with pytest.raises(TierFullError):
        tier.reserve(CAPACITY + 1)
    assert tier.used_bytes == used
    tier.check_integrity()
    for slot in slots:
        tier.free(slot)
    assert tier.used_bytes == 0


def test_freed_room_is_room_again(tier):
    for round_number in range(30):
        kept = [put(tier, round_number * 10 + i, 300_000 + i) for i in range(8)]
        for slot, data, meta in kept:
            out = np.empty(data.size, np.uint8)
            tier.read(slot, out, meta)
            np.testing.assert_array_equal(out, data)
        for slot, _, _ in kept:
            tier.free(slot)
    assert tier.used_bytes == 0


def test_safe_from_several_threads(tier):
    def work(thread: int) -> None:
        for i in range(40):
            slot, data, meta = put(tier, thread * 1000 + i, 10_000 + 777 * i)
            out = np.empty(data.size, np.uint8)
            tier.read(slot, out, meta)
            assert (out == data).all()
            tier.free(slot)

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(work, range(6), timeout=60))
    assert tier.used_bytes == 0
