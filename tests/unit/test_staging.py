"""Staging: memory for what is on its way, a budget of its own that every copy is reserved from before it is made."""

import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import torch
from pages import PAGE, grad, is_page, key, page, small_store

from tiercache import open_store
from tiercache.clock import Clock
from tiercache.errors import ConfigError, StoreTimeoutError, TierFullError
from tiercache.staging import Staging
from tiercache.testing import FakeClock, FaultTier, LateDevice, MemoryTier
from tiercache.tiers.host import HostTier

KIB = 1024


def staging(num_bytes, clock=None, help_on=lambda: None):
    return Staging(HostTier(4 * KIB, staging_bytes=num_bytes), clock or Clock(), help_on)


def use(lent, sizes, deadline=None):
    with lent.borrow(sizes, Clock().now() + 30 if deadline is None else deadline, "test"):
        pass


def test_parts_are_apart_and_come_back():
    lent = staging(64 * KIB)
    with lent.borrow([100, 0, 5 * KIB], Clock().now() + 5, "test") as parts:
        assert [part.size for part in parts] == [100, 0, 5 * KIB]
        for number, part in enumerate(parts):
            part.fill(number)
        assert (parts[0] == 0).all()
        assert (parts[2] == 2).all()
        assert 5 * KIB + 100 <= lent.used_bytes <= lent.capacity_bytes
    assert lent.used_bytes == 0
    assert lent.peak_bytes >= 5 * KIB + 100


def test_usage_is_of_one_moment(monkeypatch):
    lent, asked = staging(64 * KIB), []
    lend = lent._tier.staging
    with ThreadPoolExecutor() as pool:

        @contextmanager
        def slow(num_bytes, timeout_s):
            with lend(num_bytes, timeout_s) as memory:
                asked.append(pool.submit(lent.usage))
                time.sleep(0.05)  # lent already, and not yet counted in the peak
                yield memory

        monkeypatch.setattr(lent._tier, "staging", slow)
        use(lent, [8 * KIB])
        used, peak = asked[0].result()
    assert used <= peak


def test_more_than_there_is_is_refused_with_need_have_and_remedy():
    lent = staging(8 * KIB)
    assert lent.fits([8 * KIB])
    assert not lent.fits([8 * KIB, 1])
    with pytest.raises(TierFullError, match="need 8256 bytes; limit have 8192") as caught:
        use(lent, [8 * KIB, 1])
    assert "Raise staging" in str(caught.value)


def test_waiting_ends_at_the_deadline():
    clock = FakeClock()
    lent = staging(8 * KIB, clock)
    with lent.borrow([8 * KIB], 5, "test"), pytest.raises(StoreTimeoutError, match="until the deadline"):
        use(lent, [KIB], clock.now() + 1)
    assert lent.used_bytes == 0


def test_waiting_ends_when_others_give_back():
    lent = staging(8 * KIB)
    with ThreadPoolExecutor(1) as pool:
        with lent.borrow([8 * KIB], Clock().now() + 5, "test"):
            waiting = pool.submit(use, lent, [8 * KIB])
            time.sleep(0.05)
            assert not waiting.done()
        waiting.result(30)
    assert lent.used_bytes == 0


def test_who_waits_ends_copies_that_were_started():
    ended = []
    lent = staging(8 * KIB, help_on=lambda: ended.append(1))
    with lent.borrow([8 * KIB], Clock().now() + 5, "test"), pytest.raises(StoreTimeoutError):
        use(lent, [KIB], Clock().now() + 0.1)
    assert ended


def test_an_error_inside_gives_all_back():
    lent = staging(8 * KIB)
    with pytest.raises(ZeroDivisionError), lent.borrow([KIB], Clock().now() + 5, "test"):
        raise ZeroDivisionError
    assert lent.used_bytes == 0


def test_staging_is_part_of_the_host_budget():
    with open_store("64KiB", host="1MiB") as store:
        stats = store.stats()
        assert stats.bytes_capacity["host"] + stats.staging_capacity_bytes == 1 << 20
        assert stats.staging_capacity_bytes == 128 * KIB
    with open_store("64KiB", host="1MiB", staging="256KiB") as store:
        assert store.stats().bytes_capacity["host"] == 768 * KIB
    with open_store("64KiB") as store:
        assert store.stats().staging_capacity_bytes == 64 * KIB


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"staging": 0}, "staging: copies"),
        ({"host": "4KiB"}, "host: too small"),
        ({"host": "64KiB", "staging": "64KiB"}, "host: too small"),
        ({"staging": "much"}, "staging: no size"),
    ],
)
def test_budgets_that_cannot_be_meant_are_refused(options, said):
    with pytest.raises(ConfigError, match=said):
        open_store("64KiB", **options)


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("codec", ["zstd", "int8"])
def test_a_page_for_whose_codec_staging_is_too_small_is_kept_exact_and_counted(late, codec):
    accelerator = LateDevice() if late else None
    big = torch.randn(5 * KIB // 4)
    with small_store(16, 32, None, codec=codec, accelerator=accelerator, staging=4 * KIB) as store:
        for n in range(6):
            store.put(key(n), big + n)
        assert store.stats().uncoded > 0
        taken = [store.take(key(n)) for n in range(6)]
        if late:
            accelerator.run()
        for n in range(6):
            assert torch.equal(taken[n], big + n)
        assert store.stats().staging_peak_bytes <= 4 * KIB


def test_a_device_page_that_reaches_the_disk_by_too_small_a_staging_is_refused_by_name():
    disk = FaultTier(MemoryTier(64 * PAGE, name="disk"), lambda called, num_bytes: None)
    device = LateDevice()
    with small_store(8, None, disk, accelerator=device, staging=4 * KIB) as store:
        big = torch.randn(6 * KIB // 4)
        store.put(key(1), big)
        with pytest.raises(TierFullError, match="staging is too small"):
            store.put(key(2), big)
        assert not store.contains(key(2))
        taken = store.take(key(1))
        device.run()
        assert torch.equal(taken, big)
        store.put(key(2), big)


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("addressable", [True, False])
@pytest.mark.parametrize("codec", ["raw", "zstd"])
def test_many_threads_share_a_staging_of_one_copy(late, addressable, codec):
    """Whatever waits for whatever: nobody waits in a circle, and no more than one copy is ever on its way."""
    host = MemoryTier(3 * PAGE, name="host")
    if not addressable:
        host = FaultTier(host, lambda called, num_bytes: None)
    device = LateDevice(5) if late else None
    options = {"accelerator": device, "codec": codec, "staging": 4 * KIB, "timeout_s": 15.0}
    with small_store(3, host, 64, **options) as store:
        for n in range(12):
            store.put(key(n), page(n))

        def work(seed):
            for turn in range(60):
                n = (seed * 7 + turn * 5) % 12
                with store.read(key(n)):
                    pass
                store.accumulate(grad(seed * 3 + turn % 3), page(1))
                if turn % 10 == 9:
                    store.prefetch([key((n + 1) % 12)])

        start_s = time.monotonic()
        with ThreadPoolExecutor(3) as pool:
            list(pool.map(work, range(3), timeout=120))
        assert time.monotonic() - start_s < 12, "somebody waited until a deadline"
        if device is not None:
            device.run()
        totals = [store.take(grad(n)) for n in range(9)]
        if device is not None:
            device.run()
        assert all(is_page(total, 20) for total in totals)
        store.flush()
        store.check_integrity()
        stats = store.stats()
        assert stats.staging_used_bytes == 0
        assert stats.staging_peak_bytes <= 4 * KIB
