import pytest
import torch

from tiercache import PageKey, open_store
from tiercache.errors import PageMissingError, TierFullError


def key(n: int, kind: str = "key", graph: int = 0) -> PageKey:
    return PageKey(bytes([n]) * 32, 0, kind, graph)


def page(n: int, size: int = 256) -> torch.Tensor:
    return torch.full((size,), float(n))


def test_pages_come_back_as_they_were_put():
    with open_store(device=4096, host=8192) as store:
        for n in range(8):
            assert store.put(key(n), page(n))
        for n in range(8):
            with store.read(key(n)) as lease:
                assert torch.equal(lease.tensor, page(n))
        store.check_integrity()


def test_a_second_put_adds_a_reference():
    with open_store(device=4096) as store:
        assert store.put(key(1), page(1))
        assert not store.put(key(1), page(1))
        store.discard([key(1)])
        assert store.contains(key(1))
        store.discard([key(1)])
        assert not store.contains(key(1))
        with pytest.raises(PageMissingError):
            store.read(key(1))


def test_sums_add_in_fp32_and_can_be_taken():
    with open_store(device=4096) as store:
        for _ in range(3):
            store.accumulate(key(1, "grad_key", 1), torch.ones(8, dtype=torch.bfloat16))
        total = store.take(key(1, "grad_key", 1))
        assert total is not None
        assert total.dtype == torch.float32
        assert torch.equal(total, torch.full((8,), 3.0))
        assert store.take(key(1, "grad_key", 1)) is None


def test_a_page_larger_than_every_budget_is_refused():
    with open_store(device=512, host=4096) as store, pytest.raises(TierFullError):
        store.put(key(1), page(1, 2048))
