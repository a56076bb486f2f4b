"""The store on a real accelerator: late copies, pinned memory, and values that kernels see."""

import pytest
import torch

from tiercache import PageKey, open_store

pytestmark = pytest.mark.gpu
PAGE = (1 << 20) // 4


def key(number, kind="key", graph=0):
    return PageKey(number.to_bytes(4, "big") * 8, 0, kind, graph)


@pytest.fixture(params=["host", "disk", "all"])
def store(request, tmp_path):
    budgets = {
        "host": {"host": "64MiB"},
        "disk": {"disk": tmp_path, "disk_capacity": "256MiB"},
        "all": {"host": "8MiB", "disk": tmp_path, "disk_capacity": "256MiB"},
    }[request.param]
    with open_store(device="8MiB", accelerator="cuda", **budgets) as opened:
        yield opened
        opened.flush()
        opened.check_integrity()


def test_pages_come_back_to_their_device(store):
    for n in range(32):
        store.put(key(n), torch.full((PAGE,), float(n), device="cuda"))
    for turn in range(3):
        for n in range(32):
            with store.read(key(n)) as lease:
                assert lease.tensor.device.type == "cuda"
                assert bool((lease.tensor == n).all()), (turn, n)


def test_kernels_queued_before_release_see_the_page(store):
    for n in range(32):
        store.put(key(n), torch.full((PAGE,), float(n), device="cuda"))
    busy = torch.randn(2048, 2048, device="cuda")
    sums = []
    for turn in range(4):
        for n in range(32):
            busy = torch.tanh(busy @ busy)  # keeps the compute stream behind the copies
            with store.read(key((n * 7 + turn) % 32)) as lease:
                sums.append((lease.tensor.sum(), float((n * 7 + turn) % 32)))
    torch.cuda.synchronize()
    for total, value in sums:
        assert total.item() == value * PAGE


def test_reads_on_another_stream(store):
    for n in range(32):
        store.put(key(n), torch.full((PAGE,), float(n), device="cuda"))
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    sums = []
    with torch.cuda.stream(side):
        for n in range(32):
            with store.read(key(n)) as lease:
                sums.append(lease.tensor.sum())
    torch.cuda.synchronize()
    assert [total.item() for total in sums] == [float(n) * PAGE for n in range(32)]


def test_sums_add_wherever_they_live(store):
    for turn in range(3):
        for n in range(24):
            store.accumulate(key(n, "grad_key", 1), torch.full((PAGE,), n + turn, device="cuda").bfloat16())
    for n in range(24):
        total = store.take(key(n, "grad_key", 1))
        assert total.dtype == torch.float32
        assert bool((total == 3 * n + 3).all())


def test_host_memory_is_pinned(tmp_path):
    with open_store(device="8MiB", host="64MiB", accelerator="cuda") as store:
        assert store._books.tiers[1].pinned
