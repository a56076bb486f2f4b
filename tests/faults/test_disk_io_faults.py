"""Failed, short, late and reordered I/O, injected in the core; full and broken drives."""

from __future__ import annotations

import errno
import threading
import time

import numpy as np
import pytest
from disk_pages import MIB, data_of, get, key_of, meta_of, put

from tiercache.errors import (
    ConfigError,
    PageStateError,
    StoreClosedError,
    StoreTimeoutError,
    TierCacheError,
    TierFullError,
    TierIOError,
)
from tiercache.tiers.disk import DiskTier


@pytest.fixture(params=["io_uring", "threads"])
def tier(request, tmp_path):
    made = DiskTier(tmp_path, 64 * MIB, engine=request.param, segment_bytes=8 * MIB, faults=True)
    yield made
    made.core.clear_faults()
    made.check_integrity()
    made.close()


def test_a_failed_write_moves_to_another_segment(tier):
    tier.core.add_fault("write", "error", code=errno.EIO, times=1)
    slot = put(tier, 1, 3 * MIB)
    get(tier, slot, 1)
    stats = tier.stats()
    assert (stats["moved_writes"], stats["quarantined_segments"], tier.core.fault_hits) == (1, 1, 1)
    tier.free(slot)
    assert tier.used_bytes == 0


def test_a_write_that_fails_everywhere_is_an_error_and_leaves_nothing(tier):
    tier.core.add_fault("write", "error", code=errno.EIO)
    slot = tier.reserve(MIB)
    with pytest.raises(TierIOError) as failed:
        tier.write(slot, data_of(1, MIB), meta_of(1, MIB))
    assert failed.value.errno == errno.EIO
    with pytest.raises(PageStateError):
        tier.read(slot, np.empty(MIB, np.uint8), meta_of(1, MIB))
    assert tier.lookup(key_of(1).digest) is None
    tier.free(slot)
    assert tier.used_bytes == 0


def test_after_max_errors_the_drive_is_off_and_the_rest_go_on(tmp_path):
    two = [tmp_path / "a", tmp_path / "b"]
    tier = DiskTier(two, 256 * MIB, segment_bytes=4 * MIB, faults=True, max_errors=3)
    slots = [put(tier, n, MIB) for n in range(8)]
    assert {len(list((d / f"drive{i}").iterdir())) > 0 for i, d in enumerate(two)} == {True}
    first = [int(path.stem) for path in (two[0] / "drive0").iterdir()]
    for _ in range(3):
        for segment in range(40):
            if segment in first or (two[0] / "drive0" / f"{segment:04}.seg").exists():
                tier.core.add_fault("write", "error", segment=segment, times=1)
    number = 100
    while tier.stats()["drives_off"] == 0 and number < 200:
        for path in (two[0] / "drive0").iterdir():
            tier.core.add_fault("write", "error", segment=int(path.stem), times=1)
        slots.append(put(tier, number, MIB))
        number += 1
    assert tier.stats()["drives_off"] == 1
    before = len(list((two[0] / "drive0").iterdir()))
    slots += [put(tier, n, MIB) for n in range(300, 310)]
    assert len(list((two[0] / "drive0").iterdir())) == before  # all new files are on the other drive
    for slot in slots:
        tier.free(slot)
    tier.close()


def test_a_failed_read_is_an_error_with_its_errno(tier):
    slot = put(tier, 1, 2 * MIB)
    tier.core.add_fault("read", "error", code=errno.EIO, times=1)
    with pytest.raises(TierIOError) as failed:
        get(tier, slot, 1)
    assert failed.value.errno == errno.EIO
    get(tier, slot, 1)
    tier.free(slot)


@pytest.mark.parametrize("num_bytes", [MIB + 5, 3 * MIB, 5000])
def test_short_transfers_are_continued(tier, num_bytes):
    for kind in ("read", "write"):
        for cut in (4096, 8192, 100_000, 17):
            tier.core.add_fault(kind, "short", bytes=cut, times=2)
    slot = put(tier, 1, num_bytes)
    for _ in range(3):
        get(tier, slot, 1)
    assert tier.core.fault_hits >= 8
    assert tier.stats()["drives"][0]["short_transfers"] > 0
    assert tier.stats()["misses"] == {}
    tier.free(slot)


def test_late_and_reordered_completions_find_their_owner(tier):
    tier.core.add_fault("read", "late", delay_ms=20, times=3)
    tier.core.add_fault("write", "late", delay_ms=20, times=3)
    for kind in ("read", "write"):
        tier.core.add_fault(kind, "reorder", hold=5, times=200)
    failures: list[BaseException] = []

    def work(number: int) -> None:
        try:
            slot = put(tier, number, 2 * MIB + number)
            get(tier, slot, number)
            tier.free(slot)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failures
    assert tier.core.fault_hits > 20
    assert tier.stats()["drives"][0]["unknown_completions"] == 0
    assert tier.used_bytes == 0


def test_reads_go_before_writes_that_wait(tmp_path):
    tier = DiskTier(tmp_path, 64 * MIB, depth=1, faults=True)
    slots = {number: put(tier, number, 64 << 10) for number in range(6)}
    tier.core.add_fault("write", "late", delay_ms=150, times=7)
    order: list[str] = []

    def write(number: int) -> None:
        put(tier, number, 64 << 10)
        order.append("write")

    def read(number: int) -> None:
        get(tier, slots[number], number)
        order.append("read")

    crew = [threading.Thread(target=write, args=[10 + number]) for number in range(7)]
    crew += [threading.Thread(target=read, args=[number]) for number in range(6)]
    for thread in crew[:7]:
        thread.start()
    deadline = time.monotonic() + 10
    while tier.stats()["drives"][0]["queued"] < 6 and time.monotonic() < deadline:
        time.sleep(0.001)
    for thread in crew[7:]:
        thread.start()
    for thread in crew:
        thread.join()
    # One write was in flight; the others were queued before the reads and finish after them.
    assert order[:7].count("read") == 6
    assert order[7:] == ["write"] * 6
    tier.close()


def test_a_failed_sync_is_never_retried_and_keeps_the_record_out_of_the_index(tmp_path):
    tier = DiskTier(tmp_path, 64 * MIB, durability="power", segment_bytes=4 * MIB, faults=True)
    tier.core.add_fault("sync", "error", code=errno.EIO, times=1)
    put(tier, 1, MIB)
    tier.flush()
    stats = tier.stats()
    assert stats["misses"] == {"sync failed": 1}
    assert stats["quarantined_segments"] == 1
    put(tier, 2, MIB)  # goes to another segment
    tier.flush()
    tier.close()
    again = DiskTier(tmp_path, 64 * MIB, durability="power")
    assert again.lookup(key_of(1).digest) is None
    slot, _ = again.lookup(key_of(2).digest)
    get(again, slot, 2)
    again.close()


def test_a_page_being_written_is_served_from_memory(tier):
    tier.core.add_fault("write", "late", delay_ms=150, times=2)
    slot = tier.reserve(MIB)
    writer = threading.Thread(target=tier.write, args=(slot, data_of(1, MIB), meta_of(1, MIB)))
    writer.start()
    deadline = time.monotonic() + 10
    while tier.stats()["served_from_memory"] == 0 and time.monotonic() < deadline:
        try:
            get(tier, slot, 1)
        except PageStateError:
            time.sleep(0.001)  # the writer has not begun
    writer.join()
    assert tier.stats()["served_from_memory"] > 0
    get(tier, slot, 1)
    tier.free(slot)


def test_a_hanging_drive_is_a_timeout_not_a_hang(tmp_path):
    tier = DiskTier(tmp_path, 64 * MIB, faults=True, timeout_s=0.1)
    tier.core.add_fault("write", "late", delay_ms=400, times=1)
    slot = tier.reserve(MIB)
    with pytest.raises(StoreTimeoutError, match="I/O on"):
        tier.write(slot, data_of(1, MIB), meta_of(1, MIB))
    tier.free(slot)
    get(tier, put(tier, 2, MIB), 2)
    tier.close()


def test_exhausted_staging_is_a_timeout_and_comes_back(tmp_path):
    tier = DiskTier(tmp_path, 64 * MIB, faults=True, timeout_s=0.3, bounce_buffers=1)
    slot = tier.reserve(MIB)
    other = tier.reserve(MIB)
    tier.core.add_fault("write", "late", delay_ms=1500, times=1)
    unaligned = np.concatenate([data_of(1, MIB), data_of(1, 1)])[1:]
    meta = meta_of(1, MIB)
    outcomes: list[object] = []

    def work(target) -> None:
        try:
            tier.write(target, unaligned, meta)
        except TierCacheError as error:
            outcomes.append(type(error))

    threads = [threading.Thread(target=work, args=(target,)) for target in (slot, other)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert outcomes == [StoreTimeoutError, StoreTimeoutError]
    tier.core.clear_faults()
    tier.write(slot, unaligned, meta)
    out = np.empty(MIB + 1, np.uint8)[1:]
    tier.read(slot, out, meta)
    assert np.array_equal(out, unaligned)
    tier.close()


@pytest.mark.parametrize("engine", ["io_uring", "threads"])
def test_close_during_io_is_bounded_and_answers_everyone(tmp_path, engine):
    tier = DiskTier(tmp_path, 128 * MIB, engine=engine, faults=True, timeout_s=20)
    tier.core.add_fault("write", "late", delay_ms=100)
    answers: list[object] = []

    def work(number: int) -> None:
        try:
            while True:
                put(tier, number, 4 * MIB)
        except StoreClosedError:
            answers.append("closed")
        except TierCacheError as error:
            answers.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    time.sleep(0.15)
    started = time.monotonic()
    tier.close()
    assert time.monotonic() - started < 15
    for thread in threads:
        thread.join(15)
    assert answers == ["closed"] * 4


def test_a_drive_that_never_answers_does_not_hold_close(tmp_path):
    tier = DiskTier(tmp_path, 64 * MIB, faults=True, timeout_s=0.3)
    tier.core.add_fault("write", "late", delay_ms=3000, times=1)
    slot = tier.reserve(MIB)

    def work() -> None:
        with pytest.raises(TierCacheError):
            tier.write(slot, data_of(1, MIB), meta_of(1, MIB))

    writer = threading.Thread(target=work)
    writer.start()
    time.sleep(0.1)
    started = time.monotonic()
    tier.close()
    assert time.monotonic() - started < 2.5
    writer.join(20)
    assert not writer.is_alive()


def test_many_small_requests_fill_the_queue_and_all_finish(tmp_path):
    tier = DiskTier(tmp_path, 128 * MIB, depth=1)
    slots = [(n, put(tier, n, 3 * MIB)) for n in range(8)]
    threads = [threading.Thread(target=get, args=(tier, slot, n)) for n, slot in slots]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert tier.stats()["drives"][0]["reads"] >= 24
    tier.close()


def test_bandwidth_is_measured(tmp_path):
    tier = DiskTier(tmp_path, 64 * MIB)
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        slot = put(tier, 1, 8 * MIB)
        get(tier, slot, 1)
        tier.free(slot)
        (drive,) = tier.stats()["drives"]
        if drive["write_bytes_per_s"] > 0 and drive["read_bytes_per_s"] > 0:
            break
    assert 1e6 < drive["write_bytes_per_s"] < 1e12
    assert 1e6 < drive["read_bytes_per_s"] < 1e12
    tier.close()


def test_a_record_that_could_never_fit_is_refused_at_once(tmp_path):
    tier = DiskTier(tmp_path, 16 * MIB)
    for num_bytes in (16 * MIB, 1 << 40, 1 << 62):
        with pytest.raises(TierFullError, match="raise disk_capacity"):
            tier.reserve(num_bytes)
    slot = put(tier, 1, 15 * MIB)  # larger than a segment would be by default
    get(tier, slot, 1)
    tier.close()


@pytest.mark.parametrize(
    "arguments",
    [
        {"durability": "forever"},
        {"engine": "aio"},
        {"depth": 0},
        {"threads": 0},
        {"bounce_buffers": 0},
        {"capacity_bytes": 100},
    ],
)
def test_arguments_that_cannot_be_meant(tmp_path, arguments):
    with pytest.raises(ConfigError):
        DiskTier(tmp_path, **{"capacity_bytes": 16 * MIB, **arguments})
    DiskTier(tmp_path, 16 * MIB).close()  # the lock was let go
