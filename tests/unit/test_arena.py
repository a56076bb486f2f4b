"""The native arena: exact slots, size classes, staging, deadlines, cgroup limits."""

from __future__ import annotations

import random
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from tiercache import _core
from tiercache.errors import ConfigError, PageStateError, StoreClosedError, StoreTimeoutError, TierFullError
from tiercache.tiers.base import PageMeta
from tiercache.tiers.host import HostTier

PAGE = 4096


def test_slots_are_exact_and_aligned():
    arena = _core.Arena(10 * PAGE)
    first = arena.reserve(3 * PAGE)
    second = arena.reserve(7 * PAGE - 5)
    assert arena.used_bytes == arena.capacity_bytes == 10 * PAGE
    for offset in (first, second):
        assert arena.view(offset).ctypes.data % PAGE == 0
    with pytest.raises(TierFullError, match="reserve of 1 bytes"):
        arena.reserve(1)
    arena.release(first)
    assert arena.stats().largest_free_bytes == 3 * PAGE


def test_equal_pages_of_any_size_fill_the_budget():
    """Why slots are not rounded to powers of two: 12 pages of 5 MiB fit into 60 MiB."""
    arena = _core.Arena(60 << 20)
    for _ in range(12):
        arena.reserve(5 << 20)
    assert arena.used_bytes == 60 << 20


def test_small_slots_share_a_page():
    arena = _core.Arena(4 * PAGE)
    offsets = [arena.reserve(60) for _ in range(64)]
    assert arena.used_bytes == PAGE
    assert len({*offsets}) == 64
    for offset in offsets:
        arena.release(offset)
    assert arena.used_bytes == 0


def test_random_slots_never_overlap_and_all_come_back():
    rng = random.Random(7)
    arena = _core.Arena(1 << 20, 64 * PAGE)
    live: dict[int, tuple[int, int]] = {}
    for step in range(4000):
        if live and rng.random() < 0.5:
            offset = rng.choice(list(live))
            num_bytes, mark = live.pop(offset)
            assert np.all(arena.view(offset) == mark)
            assert arena.view(offset).size == num_bytes
            arena.release(offset)
        else:
            num_bytes = rng.choice([1, 65, 700, 2048, 2049, PAGE, 3 * PAGE + 1, 40000])
            try:
                offset = arena.reserve(num_bytes, staging=rng.random() < 0.2)
            except TierFullError:
                continue
            mark = step % 251
            arena.view(offset)[:] = mark
            live[offset] = (num_bytes, mark)
        if step % 100 == 0:
            arena.check_integrity()
    for offset in live:
        arena.release(offset)
    assert arena.used_bytes == 0
    assert arena.stats().staging_used_bytes == 0
    arena.check_integrity()


def test_reserve_waits_until_room_or_deadline():
    arena = _core.Arena(4 * PAGE)
    held = arena.reserve(4 * PAGE)
    with pytest.raises(StoreTimeoutError, match=r"0\.05"):
        arena.reserve(PAGE, timeout_s=0.05)
    timer = threading.Timer(0.05, arena.release, [held])
    timer.start()
    started = time.monotonic()
    arena.reserve(PAGE, timeout_s=30)
    assert time.monotonic() - started < 20
    timer.join()
    assert (arena.stats().waits, arena.stats().timeouts) == (2, 1)
    with pytest.raises(TierFullError):
        arena.reserve(5 * PAGE, timeout_s=30)  # could never fit: no wait


def test_writes_cannot_starve_read_staging():
    tier = HostTier(8 * PAGE, staging_bytes=2 * PAGE)
    slots = [tier.reserve(PAGE) for _ in range(8)]
    with pytest.raises(TierFullError):
        tier.reserve(PAGE)
    with tier.staging(2 * PAGE, timeout_s=0) as memory:
        assert memory.size == 2 * PAGE
        with pytest.raises(StoreTimeoutError), tier.staging(PAGE, timeout_s=0.02):
            pass
    assert tier.stats().staging_used_bytes == 0
    assert tier.used_bytes == 8 * PAGE
    for slot in slots:
        tier.free(slot)


def test_wrong_use_has_names():
    arena = _core.Arena(4 * PAGE)
    with pytest.raises(PageStateError):
        arena.release(0)
    with pytest.raises(PageStateError):
        arena.view(PAGE)
    with pytest.raises(ConfigError):
        arena.reserve(0)
    with pytest.raises(ConfigError):
        HostTier(10)
    tier = HostTier(4 * PAGE)
    slot = tier.reserve(10)
    meta = PageMeta(bytes(32), bytes(32), "uint8", (11,), "raw", 11, 11)
    with pytest.raises(PageStateError, match="another size"):
        tier.write(slot, np.zeros(11, np.uint8), meta)
    with pytest.raises(PageStateError, match="another size"):
        tier.read(slot, np.zeros(11, np.uint8), meta)
    tier.close()
    tier.close()
    with pytest.raises(StoreClosedError):
        tier.reserve(1)


def mapping_of(arena: _core.Arena) -> dict[str, str]:
    """What the kernel says of the arena's mapping."""
    offset = arena.reserve(1)
    address = arena.view(offset).ctypes.data - offset
    arena.release(offset)
    lines = iter(Path("/proc/self/smaps").read_text().splitlines())
    for line in lines:
        begin, dash, end = line.split(" ")[0].partition("-")
        if dash and int(begin, 16) <= address < int(end, 16):
            break
    fields = {}
    for line in lines:
        name, _, value = line.partition(":")
        fields[name] = value.strip()
        if name == "VmFlags":
            return fields
    raise AssertionError("no such mapping")


def test_the_arena_stays_out_of_core_dumps():
    assert "dd" in mapping_of(_core.Arena(8 << 20)).get("VmFlags", "").split()


@pytest.mark.parametrize("huge_pages", [False, True])
def test_huge_pages_are_asked_for_when_wanted(huge_pages):
    flags = mapping_of(_core.Arena(8 << 20, huge_pages=huge_pages, touch_threads=0))["VmFlags"].split()
    # The flag is there where the kernel has transparent huge pages at all.
    assert ("hg" in flags) == (huge_pages and Path("/sys/kernel/mm/transparent_hugepage").is_dir())


@pytest.mark.parametrize("threads", [0, 1, 3, 7])
def test_several_threads_touch_every_page_of_it(threads):
    size = (8 << 20) + 3 * PAGE
    arena = _core.Arena(size, 5 * PAGE, touch_threads=threads)
    resident = int(mapping_of(arena)["Rss"].split()[0]) << 10
    assert resident >= (size + 5 * PAGE if threads else 0)
    assert threads or resident < size // 2
    assert np.all(arena.view(arena.reserve(size)) == 0)


def test_memory_is_bound_to_a_node_that_there_is():
    arena = _core.Arena(1 << 20, numa_node=0)
    maps = Path("/proc/self/numa_maps")
    has_nodes = Path("/sys/devices/system/node/node0").is_dir()
    assert arena.numa_bound == has_nodes
    if has_nodes and maps.exists():
        offset = arena.reserve(1)
        address = arena.view(offset).ctypes.data - offset
        line = next(line for line in maps.read_text().splitlines() if int(line.split()[0], 16) == address)
        assert line.split()[1] == "bind:0"
    assert not _core.Arena(1 << 20, numa_node=1000).numa_bound
    assert not _core.Arena(1 << 20).numa_bound


def test_registration_is_a_hint_where_there_is_no_accelerator():
    arena = _core.Arena(8 << 20, register_cuda=True)
    assert np.all(arena.view(arena.reserve(8 << 20)) == 0)
    assert isinstance(arena.cuda_registered, bool)


def _machine(root: Path, groups: str, files: dict[str, str]) -> str:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text("MemTotal: 9000000 kB\nMemAvailable: 8000000 kB\n")
    (root / "proc/self/cgroup").write_text(groups)
    for name, text in files.items():
        path = root / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return f"{root}/"


@pytest.mark.parametrize(
    ("groups", "files", "expected"),
    [
        ("", {}, 8000000 * 1024),
        ("0::/a/b\n", {"a/b/memory.max": "max", "a/memory.max": "5000", "a/memory.current": "2000"}, 3000),
        ("0::/a/b\n", {"a/b/memory.max": "900", "a/memory.max": "5000", "a/memory.current": "2000"}, 900),
        ("0::/a\n", {"a/memory.max": "900", "a/memory.current": "901"}, 0),
        ("0::/a\n", {"a/memory.max": "garbage"}, 8000000 * 1024),
        ("0::/a\n", {"a/memory.max": "0", "a/memory.current": "9"}, 8000000 * 1024),
        (
            "0::/a\n",
            {
                "a/memory.max": "900",
                "a/memory.current": "901",
                "a/memory.stat": "anon 1\ninactive_file 401\n",
            },
            400,
        ),
        (
            "4:memory:/x\n",
            {
                "memory/x/memory.limit_in_bytes": "900",
                "memory/x/memory.usage_in_bytes": "800",
                "memory/x/memory.stat": "inactive_file 1\ntotal_inactive_file 300\n",
            },
            400,
        ),
        (
            "4:memory:/x/y\n1:cpu:/z\n",
            {"memory/x/memory.limit_in_bytes": "7000", "memory/x/memory.usage_in_bytes": "1000"},
            6000,
        ),
        (
            "4:cpu,memory:/x\n",
            {"memory/memory.limit_in_bytes": "70", "memory/x/memory.limit_in_bytes": "80"},
            70,
        ),
        ("4:memory:/x\n", {"memory/x/memory.limit_in_bytes": str(2**63 - 4096)}, 8000000 * 1024),
    ],
)
def test_available_memory_is_the_smallest_headroom(tmp_path, groups, files, expected):
    assert _core.available_memory(_machine(tmp_path, groups, files)) == expected


def test_host_tier_never_asks_for_more_than_there_is_and_says_so(caplog):
    tier = HostTier(1 << 60)
    assert tier.capacity_bytes <= _core.available_memory() * 1.1
    assert str(tier.capacity_bytes) in caplog.text
    tier.close()


def test_host_tier_within_its_means_says_nothing(caplog):
    HostTier(1 << 20).close()
    assert not caplog.text
