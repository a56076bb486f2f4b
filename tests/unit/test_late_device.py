"""The store on a device whose copies happen late: what a kernel reads is right whenever it runs."""

import random

import pytest
import torch
from pages import PAGE, grad, is_page, key, page, small_store

from tiercache.clock import Clock
from tiercache.errors import TierFullError
from tiercache.testing import LateDevice


def finish(device, store):
    device.finish(device.mark(torch.empty(0)), 0, Clock())


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("codec", ["raw", "zstd"])
def test_kernels_see_their_pages_however_late_copies_are(seed, codec):
    rng = random.Random(seed)
    device = LateDevice(seed)
    expected, seen, sums = {}, [], {}
    with small_store(4, 4, 64, accelerator=device, codec=codec) as store:
        for turn in range(250):
            n = rng.randrange(10)
            action = rng.random()
            if action < 0.3 and n not in expected:
                expected[n] = float(turn)
                store.put(key(n), page(turn))
            elif action < 0.7 and n in expected:
                with store.read(key(n)) as lease:
                    out, tensor, value = page(-1), lease.tensor, expected[n]
                    device.launch(lambda out=out, tensor=tensor: out.copy_(tensor))
                    seen.append((out, value))
            elif action < 0.8:
                store.accumulate(grad(n), page(turn))
                sums[n] = sums.get(n, 0.0) + turn
            elif action < 0.85 and n in sums:
                seen.append((store.take(grad(n)), sums.pop(n)))
            elif action < 0.95 and n in expected:
                store.discard([key(n)])
                del expected[n]
            else:
                store.prefetch([key(n), key((n + 1) % 10)])
            if rng.random() < 0.3:
                device.run(rng.randrange(6))
        for n, value in expected.items():
            with store.read(key(n)) as lease:
                out, tensor = page(-1), lease.tensor
                device.launch(lambda out=out, tensor=tensor: out.copy_(tensor))
                seen.append((out, value))
        finish(device, store)
        assert len(seen) > 60
        for out, value in seen:
            assert is_page(out, value)
        store.flush()
        device.run()
        store.check_integrity()
        assert store.stats().bytes_moved["device->host"] > 0
    assert device.num_freed > 0


def test_a_read_returns_before_its_copy_has_happened():
    device = LateDevice()
    with small_store(2, 8, None, accelerator=device) as store:
        for n in range(4):
            store.put(key(n), page(n))
        store.flush()
        low = next(n for n in range(4) if store._books.table[key(n)].source() == 1)
        lease = store.read(key(low))
        out, tensor = page(-1), lease.tensor
        device.launch(lambda: out.copy_(tensor))
        lease.release()
        store.discard([key(low)])
        finish(device, store)
        assert is_page(out, low)


def test_the_fake_catches_a_store_that_frees_too_early():
    device = LateDevice(3)
    tensor = device.clone(page(1), torch.float32)
    out = page(-1)
    copied = device.to_host(tensor, out, None)
    device.free(tensor)
    device.run()
    assert copied.done
    assert not is_page(out, 1), "the copy had no event to wait for, and the memory was reused"


def test_leases_hold_the_budget_on_a_late_device():
    device = LateDevice()
    with small_store(2, None, 8, accelerator=device) as store:
        for n in range(2):
            store.put(key(n), page(n))
        leases = [store.read(key(n)) for n in range(2)]
        store.put(key(5), page(5))
        with pytest.raises(TierFullError):
            store.read(key(5))
        assert store.stats().bytes_used["device"] == 2 * PAGE
        for lease in leases:
            lease.release()
        with store.read(key(5)) as lease:
            finish(device, store)
            assert is_page(lease.tensor, 5)
