import contextlib
import errno
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from pages import PAGE, grad, is_page, key, page, small_store

from tiercache import open_store
from tiercache.entry import Entry, Rise
from tiercache.errors import (
    ConfigError,
    PageCorruptError,
    PageMissingError,
    StoreClosedError,
    StoreForkedError,
    StoreTimeoutError,
    TierFullError,
    TierIOError,
)
from tiercache.testing import FaultTier, MemoryTier, NullTier
from tiercache.testing.tiers import failing


def faulty_disk(fault, capacity=64):
    return FaultTier(MemoryTier(capacity * PAGE, name="disk"), fault)


class Gate:
    """Holds writes (or reads) until it is opened."""

    def __init__(self, operation):
        self.operation = operation
        self.entered, self.open = threading.Event(), threading.Event()

    def __call__(self, called, num_bytes):
        if called == self.operation:
            self.entered.set()
            assert self.open.wait(30)


@pytest.mark.parametrize("attempt", range(30))
def test_disk_full_falls_back_to_the_room_that_is_left_then_says_so(attempt):
    """Many times: write-behind may hold the last room with a copy, or be in the middle of one."""
    disk = faulty_disk(failing("write", errno.ENOSPC))
    with small_store(device=2, host=3, disk=disk) as store:
        for n in range(5):
            store.put(key(n), page(n))
        with pytest.raises(TierFullError) as caught:
            store.put(key(5), page(5))
        assert "have" in str(caught.value)
        assert not store.contains(key(5))
        store.check_integrity()
        store.discard([key(0)])
        store.put(key(5), page(5))
        for n in range(1, 6):
            assert is_page(store.take(key(n)), n)


def test_room_on_disk_is_made_by_dropping_copies_that_lie_further_up():
    with small_store(device=2, host=None, disk=2) as store:
        for n in range(3):
            store.put(key(n), page(n))
        below = next(n for n in range(3) if store._books.table[key(n)].source() == 1)
        lease = store.read(key(below))
        store.put(key(7), page(7))
        for n in (0, 1, 2, 7):
            assert store.contains(key(n))
        lease.release()
        store.check_integrity()


def test_an_io_error_reaches_the_caller_with_its_errno_and_the_pages_stay():
    disk = faulty_disk(failing("write", errno.EIO))
    with small_store(device=2, host=None, disk=disk) as store:
        for n in range(2):
            store.put(key(n), page(n))
        with pytest.raises(TierIOError) as caught:
            store.put(key(2), page(2))
        assert caught.value.errno == errno.EIO
        assert not store.contains(key(2))
        store.flush()
        for n in range(2):
            with store.read(key(n)) as lease:
                assert is_page(lease.tensor, n)
        assert store.stats().demotion_errors >= 1
        disk.fault = lambda called, num_bytes: None
        store.put(key(2), page(2))


def test_a_failed_read_leaves_the_page_where_it_is():
    disk = faulty_disk(lambda called, num_bytes: None)
    with small_store(device=2, host=None, disk=disk) as store:
        for n in range(4):
            store.put(key(n), page(n))
        low = next(n for n in range(4) if store._books.table[key(n)].source() == 1)
        disk.fault = failing("read", errno.EIO, times=2)
        with pytest.raises(TierIOError) as caught:
            store.read(key(low))
        assert caught.value.errno == errno.EIO
        with pytest.raises(TierIOError):
            store.take(key(low))
        store.check_integrity()
        with store.read(key(low)) as lease:
            assert is_page(lease.tensor, low)


def test_an_error_of_a_worker_reaches_the_reader_that_waits_for_it():
    gate = Gate("read")
    disk = faulty_disk(lambda called, num_bytes: None)
    with small_store(device=2, host=None, disk=disk) as store:
        for n in range(4):
            store.put(key(n), page(n))
        store.flush()
        low = next(n for n in range(4) if store._books.table[key(n)].source() == 1)

        def fail_late(called, num_bytes):
            gate(called, num_bytes)
            failing("read", errno.EIO)(called, num_bytes)

        disk.fault = fail_late
        store.prefetch([key(low)])
        assert gate.entered.wait(30), "the device's pages are clean, so the hint finds room"
        with ThreadPoolExecutor(1) as pool:
            reading = pool.submit(store.read, key(low))
            time.sleep(0.05)
            assert not reading.done()
            gate.open.set()
            with pytest.raises(TierIOError) as caught:
                reading.result(30)
        assert caught.value.errno == errno.EIO
        disk.fault = lambda called, num_bytes: None
        with store.read(key(low)) as lease:
            assert is_page(lease.tensor, low)


def test_a_record_that_fails_its_proof_is_a_miss_and_can_be_captured_again():
    with small_store(device=2, host=None, disk=NullTier(64 * PAGE)) as store:
        for n in range(4):
            store.put(key(n), page(n))
        lost = next(n for n in range(4) if store._books.table[key(n)].source() == 1)
        with pytest.raises(PageCorruptError):
            store.read(key(lost))
        with pytest.raises(PageMissingError):
            store.read(key(lost))
        assert store.stats().lost_pages == 1
        store.check_integrity()
        store.put(key(lost), page(lost))
        assert store.contains(key(lost))


def test_a_page_that_is_being_written_is_served_from_memory():
    gate = Gate("write")
    with small_store(device=8, host=None, disk=faulty_disk(gate)) as store:
        for n in range(7):
            store.put(key(n), page(n))
        assert gate.entered.wait(30), "write-behind begins when the device is nearly full"
        for n in range(7):
            with store.read(key(n)) as lease:
                assert is_page(lease.tensor, n)
        assert store.stats().misses == 0
        gate.open.set()


def test_discarding_while_copies_are_in_flight_leaks_nothing():
    gate = Gate("write")
    with small_store(device=8, host=None, disk=faulty_disk(gate)) as store:
        graph = store.new_graph()
        for n in range(7):
            store.put(key(n, "layer_input", graph), page(n))
        assert gate.entered.wait(30)
        store.discard(graph=graph)
        assert store.stats().pages == 0
        gate.open.set()
        store.flush()
        store.check_integrity()
        assert store.stats().bytes_used == {"device": 0, "disk": 0}


def test_discarding_ends_a_queued_promotion_at_once_and_one_under_way_with_its_copy():
    gate = Gate("read")
    disk = faulty_disk(lambda called, num_bytes: None)
    with small_store(device=4, host=None, disk=disk, transfer_threads=1) as store:
        for n in range(8):
            store.put(key(n), page(n))
        store.flush()
        low = [n for n in range(8) if store._books.table[key(n)].source() == 1][:2]
        high = [key(n) for n in range(8) if store._books.table[key(n)].source() == 0]
        store.discard(high)
        disk.fault = gate
        store.prefetch([key(n) for n in low])
        assert gate.entered.wait(30)
        assert store.stats().bytes_used["device"] == 2 * PAGE
        store.discard([key(n) for n in low])
        assert store.stats().bytes_used["device"] == PAGE, "the queued one's room is free already"
        gate.open.set()
        store.flush()
        assert store.stats().bytes_used["device"] == 0
        store.check_integrity()


def test_discarding_while_a_page_comes_up_is_a_miss():
    gate = Gate("read")
    with small_store(device=2, host=None, disk=faulty_disk(gate)) as store, ThreadPoolExecutor(1) as pool:
        for n in range(4):
            store.put(key(n), page(n))
        low = next(n for n in range(4) if store._books.table[key(n)].source() == 1)
        reading = pool.submit(store.read, key(low))
        assert gate.entered.wait(30)
        store.discard([key(low)])
        gate.open.set()
        with contextlib.suppress(PageMissingError):
            reading.result(30).release()
        assert not store.contains(key(low))
        store.check_integrity()


def test_closing_waits_for_copies_and_frees_all():
    gate = Gate("write")
    store = small_store(device=8, host=None, disk=faulty_disk(gate))
    for n in range(7):
        store.put(key(n), page(n))
    assert gate.entered.wait(30)
    threading.Timer(0.1, gate.open.set).start()
    store.close()
    assert store.stats().bytes_used == {"device": 0, "disk": 0}
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("tiercache-transfer")]


def test_closing_is_bounded():
    gate = Gate("write")
    store = small_store(device=8, host=None, disk=faulty_disk(gate), timeout_s=0.3)
    for n in range(7):
        store.put(key(n), page(n))
    assert gate.entered.wait(30)
    start_s = time.monotonic()
    with pytest.raises(StoreTimeoutError, match="close"):
        store.close()
    assert time.monotonic() - start_s < 10
    gate.open.set()
    store.close()


def test_closing_wakes_who_waits():
    store = small_store(device=1, host=None, disk=8)
    store.put(key(1), page(1))
    lease = store.read(key(1))
    with ThreadPoolExecutor(2) as pool:
        second = pool.submit(lambda: store.put(key(2), page(2)) and store.read(key(2)))
        time.sleep(0.1)
        store.close()
        with pytest.raises((StoreClosedError, TierFullError)):
            second.result(30).release()
    lease.release()


def test_a_thread_that_wakes_after_close_gives_up_what_was_forgotten():
    """Its page failed, and burying it finds that closing has forgotten every page already."""
    store = small_store()
    books = store._books
    entry = Entry(key(1), torch.float32, (4,), torch.device("cpu"), len(books.tiers))
    with books.changed:
        books.enter(entry)
    store.close()
    with books.changed:
        books.bury(entry)
        assert entry.dead
        assert books.by_id == []


@pytest.mark.parametrize("end", ["rise", "busy"])
def test_who_waits_for_a_page_wakes_when_its_change_ends(end):
    """The last event of a promotion or a sum is the end of its state; without a wake-up there it took the deadline."""
    with small_store(device=4) as store:
        store.accumulate(grad(1), page(1))
        books = store._books
        with books.changed:
            entry = books.table[grad(1)]
            entry.rise, entry.busy = (Rise(0), False) if end == "rise" else (None, True)
            if entry.rise is not None:
                entry.rise.started = True
        with ThreadPoolExecutor(1) as pool:
            adding = pool.submit(store.accumulate, grad(1), page(1))
            while not books._waiting:
                time.sleep(0.001)
            with books.changed:
                entry.rise, entry.busy = None, False
                books.settle(entry)
            start_s = time.monotonic()
            adding.result(30)
            assert time.monotonic() - start_s < 10
        assert torch.equal(store.take(grad(1)), page(2))


def test_a_forked_child_is_told_and_touches_nothing():
    with small_store() as store:
        store.put(key(1), page(1))
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                store.read(key(1))
            except StoreForkedError:
                os.write(writer, b"told")
            except BaseException:
                os.write(writer, b"else")
            os._exit(0)
        os.close(writer)
        assert os.read(reader, 4) == b"told"
        os.close(reader)
        os.waitpid(child, 0)
        with store.read(key(1)) as lease:
            assert is_page(lease.tensor, 1)


def test_a_sum_that_cannot_go_down_stays_whole():
    disk = faulty_disk(failing("write", errno.EIO))
    with small_store(device=2, host=None, disk=disk) as store:
        for n in range(2):
            store.accumulate(grad(n), page(n))
        with pytest.raises(TierIOError):
            store.accumulate(grad(2), page(2))
        for n in range(2):
            store.accumulate(grad(n), page(1))
            assert is_page(store.take(grad(n)), n + 1)
        assert store.take(grad(2)) is None


@pytest.mark.parametrize("bad", ["file", "below_file"])
def test_a_disk_path_that_is_no_directory_is_refused(tmp_path, bad):
    path = tmp_path / "file"
    path.write_text("x")
    with pytest.raises(ConfigError, match="not a directory"):
        open_store(device="1MiB", disk=path if bad == "file" else path / "below", disk_capacity="64MiB")


def test_a_disk_path_that_cannot_be_written_is_refused(monkeypatch, tmp_path):
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(ConfigError, match="not writable"):
        open_store(device="1MiB", disk=tmp_path, disk_capacity="64MiB")


def test_ten_thousand_reads_race_evictions():
    with small_store(device=3, host=3, disk=64) as store:
        for n in range(12):
            store.put(key(n), page(n))

        def read_many(seeds):
            for seed in seeds:
                for turn in range(2500):
                    n = (seed * 7 + turn * 5) % 12
                    with store.read(key(n)) as lease:
                        assert is_page(lease.tensor, n)

        # Three readers and three pages of room: whoever reads evicts what another is about to read.
        with ThreadPoolExecutor(3) as pool:
            list(pool.map(read_many, [[0], [1], [2, 3]], timeout=120))
        store.flush()
        store.check_integrity()
        assert store.stats().evictions > 1000
