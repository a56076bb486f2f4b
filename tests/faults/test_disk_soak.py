"""Ten minutes of puts, reads, frees, failures and reopenings: memory, descriptors, threads and bytes stay flat."""

from __future__ import annotations

import os
import random
import time
from pathlib import Path

import psutil
import pytest
from disk_pages import MIB, get, key_of, put

from tiercache.tiers.disk import DiskTier


def soak(root: Path, seconds: float) -> None:
    rng = random.Random(3)
    process = psutil.Process()
    end = time.monotonic() + seconds
    marks: list[tuple[int, int, int, int]] = []
    tier = DiskTier(root, 32 * MIB, durability="process", segment_bytes=4 * MIB, faults=True)
    live: dict[int, object] = {}
    rounds = 0
    while time.monotonic() < end or len(marks) < 4:
        for _ in range(120):
            number = rng.randrange(80)
            slot = live.pop(number, None)
            if slot is not None:
                get(tier, slot, number)
                tier.remove(key_of(number).digest)
            else:
                live[number] = put(tier, number)
            if rng.random() < 0.02:
                tier.core.add_fault(
                    rng.choice(["read", "write"]), "short", bytes=4096 * rng.randrange(1, 9), times=1
                )
        for number, slot in live.items():
            get(tier, slot, number)
            tier.remove(key_of(number).digest)
        live.clear()
        tier.flush()
        assert tier.used_bytes == 0
        tier.check_integrity()
        rounds += 1
        if rounds % 3 == 0:
            tier.close()
            marks.append(
                (
                    process.memory_info().rss,
                    process.num_fds(),
                    process.num_threads(),
                    sum(path.stat().st_size for path in root.rglob("*") if path.is_file()),
                )
            )
            tier = DiskTier(root, 32 * MIB, durability="process", segment_bytes=4 * MIB, faults=True)
    tier.close()
    warm = marks[len(marks) // 4 :]
    assert max(rss for rss, *_ in warm) <= warm[0][0] + 16 * MIB
    assert {fds for _, fds, _, _ in warm} == {warm[0][1]}
    assert (
        max(threads for _, _, threads, _ in warm) <= marks[0][2] + 2
    )  # io_uring's kernel workers come and go
    assert max(size for *_, size in warm) <= 33 * MIB + (1 << 20)
    assert len(os.listdir(root / "drive0")) <= 9


def test_a_short_soak_is_flat(tmp_path):
    soak(tmp_path, 2)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_ten_minutes_are_flat(tmp_path):
    soak(tmp_path, 600)
