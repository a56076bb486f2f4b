import gc
import threading

import pytest
import torch
from pages import PAGE, grad, is_page, key, page, small_store

from tiercache import AccessPlan, open_store
from tiercache.errors import (
    InputError,
    PageMissingError,
    PageStateError,
    StoreClosedError,
    StoreTimeoutError,
    TierFullError,
)
from tiercache.testing import FakeClock


@pytest.fixture(params=["device", "host", "disk", "all"])
def store(request, tmp_path):
    """Stores over real tiers; room for 16 pages of 4 KiB and more."""
    budgets = {
        "device": {"device": "64KiB"},
        "host": {"device": "16KiB", "host": "64KiB"},
        "disk": {"device": "16KiB", "disk": tmp_path, "disk_capacity": "8MiB"},
        "all": {"device": "16KiB", "host": "16KiB", "disk": tmp_path, "disk_capacity": "8MiB"},
    }[request.param]
    with open_store(**budgets, timeout_s=20.0) as opened:
        yield opened
        opened.flush()
        opened.check_integrity()
    assert set(opened.stats().bytes_used.values()) == {0}


def test_pages_come_back_from_every_tier(store):
    for n in range(16):
        assert store.put(key(n), page(n, 4096))
    for turn in range(2):
        for n in range(16):
            with store.read(key(n)) as lease:
                assert is_page(lease.tensor, n), (turn, n)
    stats = store.stats()
    for name, used in stats.bytes_used.items():
        assert used <= stats.bytes_peak[name] <= stats.bytes_capacity[name]
    assert stats.reads == stats.hits + stats.misses == 32


@pytest.mark.parametrize(
    "dtype",
    [
        torch.bool,
        torch.int8,
        torch.int64,
        torch.float16,
        torch.bfloat16,
        torch.float64,
        torch.complex64,
        torch.float8_e4m3fn,
    ],
)
def test_every_dtype_and_stride_comes_back(dtype):
    with small_store(device=2, host=2, disk=64) as store:
        shapes = [(), (1,), (3, 5), (2, 3, 4)]
        pages = [torch.randint(0, 2, shape).to(dtype) for shape in shapes]
        pages += [pages[2].t(), pages[3][:, 1], pages[3].permute(2, 0, 1), pages[1].expand(7)]
        for n, tensor in enumerate(pages):
            store.put(key(n), tensor)
        filler = [store.put(key(100 + n), page(n)) for n in range(8)]
        assert all(filler)
        for n, tensor in enumerate(pages):
            with store.read(key(n)) as lease:
                assert lease.tensor.dtype == dtype
                assert lease.tensor.is_contiguous()
                assert lease.tensor.shape == tensor.shape
                mine, theirs = lease.tensor.reshape(-1), tensor.contiguous().reshape(-1)
                assert torch.equal(mine.view(torch.uint8), theirs.view(torch.uint8))


def test_conjugate_and_empty_tensors_come_back():
    with small_store(device=2) as store:
        values = torch.tensor([1 + 2j, 3 - 4j])
        store.put(key(1), values.conj())
        store.put(key(2), torch.empty(0, 3))
        for n in range(8):
            store.put(key(10 + n), page(n))
        with store.read(key(1)) as lease:
            assert torch.equal(lease.tensor, values.conj().resolve_conj())
        with store.read(key(2)) as lease:
            assert lease.tensor.shape == (0, 3)


def test_a_put_copies_unless_it_owns():
    with small_store() as store:
        mine, given = page(1), page(2)
        store.put(key(1), mine)
        store.put(key(2), given, own=True)
        store.put(key(3), torch.cat([page(3), page(4)])[: PAGE // 4], own=True)
        mine.fill_(9)
        with store.read(key(1)) as lease:
            assert is_page(lease.tensor, 1)
        with store.read(key(2)) as lease:
            assert lease.tensor.data_ptr() == given.data_ptr()
        with store.read(key(3)) as lease:
            assert lease.tensor.untyped_storage().nbytes() == PAGE, "a slice must not keep its base"


def test_references_are_counted():
    with small_store() as store:
        assert store.put(key(1), page(1))
        assert not store.put(key(1), page(1))
        store.discard([key(1), key(7)])
        assert store.contains(key(1))
        store.discard([key(1)])
        assert not store.contains(key(1))
        with pytest.raises(PageMissingError):
            store.read(key(1))
        with pytest.raises(PageMissingError):
            store.num_bytes(key(1))


def test_one_key_names_one_page():
    with small_store() as store:
        store.put(key(1), page(1))
        with pytest.raises(PageStateError):
            store.put(key(1), page(1).double())
        with pytest.raises(PageStateError):
            store.accumulate(key(1), page(1))
        store.accumulate(grad(1), page(1))
        with pytest.raises(PageStateError):
            store.put(grad(1), page(1))


def test_sums_are_fp32_or_fp64_wherever_they_live():
    with small_store(device=2, host=2, disk=64) as store:
        for turn in range(3):
            for n in range(12):
                store.accumulate(grad(n), torch.full((PAGE // 4,), n + turn * 2.0**-9, dtype=torch.bfloat16))
        store.check_integrity()
        for n in range(12):
            total = sum(torch.tensor(n + t * 2.0**-9, dtype=torch.bfloat16).float() for t in range(3))
            with store.read(grad(n)) as lease:
                assert lease.tensor.dtype == torch.float32
                assert is_page(lease.tensor, total)
        for n in range(12):
            assert store.take(grad(n)) is not None
            assert store.take(grad(n)) is None
        store.accumulate(grad(50), torch.ones(4, dtype=torch.float64))
        store.accumulate(grad(50), torch.ones(4))
        assert store.take(grad(50)).dtype == torch.float64
        assert store.stats().pages == 0


def test_wrong_addends_are_refused():
    with small_store() as store:
        store.accumulate(grad(1), page(1))
        with pytest.raises(InputError):
            store.accumulate(grad(1), page(1)[:5])
        with pytest.raises(InputError):
            store.accumulate(grad(1), page(1).double())
        with pytest.raises(InputError):
            store.put(key(1), page(1).to_sparse())
        with store.read(grad(1)) as lease, pytest.raises(PageStateError, match="leased"):
            store.accumulate(grad(1), page(1))
        assert is_page(lease._entry.places[0].tensor, 1)


def test_take_hands_the_page_over():
    with small_store(device=2, host=2) as store:
        for n in range(6):
            store.put(key(n), page(n))
        store.put(key(0), page(0))
        for n in range(6):
            taken = store.take(key(n))
            assert is_page(taken, n)
            taken.fill_(-1)
        assert is_page(store.take(key(0)), 0), "one reference was left"
        assert store.stats().pages == 0
        store.put(key(1), page(1))
        with store.read(key(1)), pytest.raises(PageStateError):
            store.take(key(1))


def test_graphs_are_dropped_whole():
    with small_store() as store:
        first, second = store.new_graph(), store.new_graph()
        assert (first, second) == (1, 2)
        for graph in (first, second):
            store.accumulate(grad(1, graph), page(graph))
            store.put(key(1, "layer_input", graph), page(graph))
        store.put(key(1), page(0))
        store.discard(graph=first)
        store.discard(graph=99)
        assert not store.contains(grad(1, first))
        assert is_page(store.take(grad(1, second)), second)
        assert store.contains(key(1))


def test_a_leased_page_stays_and_others_go_around_it():
    with small_store(device=3, host=None, disk=64) as store:
        for n in range(3):
            store.put(key(n), page(n))
        leases = [store.read(key(n)) for n in range(3)]
        places = [lease.tensor.data_ptr() for lease in leases]
        store.put(key(10), page(10))
        assert store.stats().bytes_used["device"] == 3 * PAGE
        with pytest.raises(
            TierFullError, match=r"read .*device tier; got need 1024 bytes; limit have 0 free"
        ):
            store.read(key(10))
        for n, lease in enumerate(leases):
            assert is_page(lease.tensor, n)
            assert lease.tensor.data_ptr() == places[n]
        leases[0].release()
        leases[0].release()
        with pytest.raises(PageStateError):
            leases[0].tensor  # noqa: B018 - the access is the test
        with store.read(key(10)) as lease:
            assert is_page(lease.tensor, 10)


def test_a_discarded_page_lives_until_its_lease_ends():
    with small_store(device=2) as store:
        store.put(key(1), page(1))
        with store.read(key(1)) as lease:
            store.discard([key(1)])
            assert not store.contains(key(1))
            store.put(key(1), page(5))
            assert is_page(lease.tensor, 1)
            assert store.stats().bytes_used["device"] == 2 * PAGE
        assert store.stats().bytes_used["device"] == PAGE


def test_a_forgotten_lease_ends_when_it_is_collected():
    with small_store(device=1, host=None, disk=None) as store:
        store.put(key(1), page(1))
        store.read(key(1))
        gc.collect()
        store.discard([key(1)])
        assert store.put(key(2), page(2)), "the device has room for one page"


def test_discard_later_waits_for_the_next_call():
    with small_store() as store:
        store.put(key(1), page(1))
        store.discard_later([key(1), key(2)])
        store.check_integrity()
        assert not store.contains(key(1))


def test_a_page_larger_than_its_budgets_is_refused_with_what_to_do():
    with small_store(device=2, host=2, disk=None) as store:
        with pytest.raises(TierFullError) as caught:
            store.put(key(1), page(1, 3 * PAGE))
        assert "need 3072 bytes" in str(caught.value)
        assert "Raise the budget" in str(caught.value)
        assert not store.contains(key(1))
        with pytest.raises(TierFullError):
            store.accumulate(grad(1), page(1, 3 * PAGE))
        assert store.stats().pages == 0
        for n in range(4):
            store.put(key(n), page(n))
        with pytest.raises(TierFullError):
            store.put(key(9), page(9))
        for n in range(2):
            store.discard([key(n)])
        store.put(key(9), page(9))


def test_a_page_too_large_for_the_device_goes_below_and_cannot_be_leased():
    with small_store(device=1, host=4) as store:
        store.put(key(1), page(1, 2 * PAGE))
        with pytest.raises(TierFullError):
            store.read(key(1))
        assert is_page(store.take(key(1)), 1)


def test_waiting_for_another_threads_lease_ends_at_the_deadline():
    with small_store(device=1, host=None, disk=8, clock=FakeClock(), timeout_s=5.0) as store:
        store.put(key(1), page(1))
        held, done = threading.Event(), threading.Event()

        def hold():
            with store.read(key(1)):
                held.set()
                done.wait(30)

        thread = threading.Thread(target=hold)
        thread.start()
        held.wait(30)
        with pytest.raises(StoreTimeoutError):
            store.put(key(2), page(2))
        assert not store.contains(key(2))
        done.set()
        thread.join(30)
        store.put(key(2), page(2))


def test_what_a_finalizer_gave_up_while_the_store_was_busy_is_not_counted():
    with small_store() as store:
        store.put(key(1), page(1))
        with store._books.changed:  # a worker holds the lock just now
            store.discard_later([key(1)])
        assert store.stats().pages == 0


def test_a_closed_store_says_so():
    others = set(threading.enumerate())
    store = small_store()
    store.put(key(1), page(1))
    lease = store.read(key(1))
    store.close()
    store.close()
    assert is_page(lease.tensor, 1)
    lease.release()
    calls = [
        lambda: store.put(key(2), page(2)),
        lambda: store.read(key(1)),
        lambda: store.accumulate(grad(1), page(1)),
        lambda: store.take(key(1)),
        lambda: store.contains(key(1)),
        lambda: store.num_bytes(key(1)),
        lambda: store.discard([key(1)]),
        lambda: store.discard(graph=1),
        lambda: store.prefetch([key(1)]),
        lambda: store.follow(AccessPlan()),
        store.flush,
        store.new_graph,
        store.check_integrity,
    ]
    for call in calls:
        with pytest.raises(StoreClosedError):
            call()
    assert store.stats().bytes_used == {"device": 0, "host": 0, "disk": 0}
    assert not set(threading.enumerate()) - others


def test_stats_are_ready_for_json():
    import json

    with small_store() as store:
        store.put(key(1), page(1))
        store.read(key(1)).release()
        told = json.loads(json.dumps(store.stats().as_dict()))
        assert told["puts"] == told["reads"] == told["hits"] == told["pages"] == 1
        assert told["bytes_used"]["device"] == PAGE
