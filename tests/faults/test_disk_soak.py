"""Ten minutes of puts, reads, frees, failures and reopenings: memory, descriptors, threads and bytes stay flat."""

from __future__ import annotations

import os
import random
import time
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest
from disk_pages import MIB, get, key_of, put

from tiercache.tiers.disk import DiskTier


class Mark(NamedTuple):
    """What the process and the drive hold between two lives of the tier."""

    rss_bytes: int
    num_fds: int
    num_threads: int
    drive_bytes: int
    num_files: int


def soak(root: Path, seconds: float) -> list[Mark]:
    rng = random.Random(3)
    process = psutil.Process()
    end = time.monotonic() + seconds
    marks: list[Mark] = []
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
                Mark(
                    process.memory_info().rss,
                    process.num_fds(),
                    process.num_threads(),
                    sum(path.stat().st_size for path in root.rglob("*") if path.is_file()),
                    len(os.listdir(root / "drive0")),
                )
            )
            tier = DiskTier(root, 32 * MIB, durability="process", segment_bytes=4 * MIB, faults=True)
    tier.close()
    return marks


def grown(marks: list[Mark]) -> list[str]:
    """What did not stay flat, once the first quarter had warmed up."""
    warm = marks[len(marks) // 4 :]
    flat = {
        "rss_bytes": max(mark.rss_bytes for mark in warm) <= warm[0].rss_bytes + 16 * MIB,
        "num_fds": {mark.num_fds for mark in warm} == {warm[0].num_fds},
        # io_uring's kernel workers come and go
        "num_threads": max(mark.num_threads for mark in warm) <= marks[0].num_threads + 2,
        "drive_bytes": max(mark.drive_bytes for mark in warm) <= 33 * MIB + (1 << 20),
        "num_files": max(mark.num_files for mark in warm) <= 9,
    }
    return [name for name, is_flat in flat.items() if not is_flat]


def test_a_short_soak_is_flat(tmp_path):
    marks = soak(tmp_path, 2)
    assert grown(marks) == [], marks


@pytest.mark.long
@pytest.mark.timeout(900)
def test_ten_minutes_are_flat(tmp_path):
    marks = soak(tmp_path, 600)
    assert grown(marks) == [], marks
