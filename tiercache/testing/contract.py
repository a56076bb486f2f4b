"""The contract of a tier as a pytest suite."""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections.abc import Iterator

import numpy as np
import pytest

from tiercache.errors import TierFullError
from tiercache.tiers.base import ByteArray, PageMeta, Slot, Tier


def make_meta(num_bytes: int, number: int = 0) -> PageMeta:
    """A record of raw bytes."""
    return PageMeta(
        digest=number.to_bytes(32, "big"),
        namespace=bytes(32),
        dtype="uint8",
        shape=(num_bytes,),
        codec="raw",
        raw_bytes=num_bytes,
        stored_bytes=num_bytes,
    )


def _bytes(num_bytes: int, seed: int) -> ByteArray:
    return np.random.default_rng(seed).integers(0, 256, num_bytes, dtype=np.uint8)


class TierContract:
    """Inherit in a test module and implement `create_tier`; pytest then runs every rule of the contract."""

    capacity_bytes = 1 << 20
    page_bytes = 1 << 16

    @abstractmethod
    def create_tier(self, capacity_bytes: int) -> Tier:
        """A fresh, empty tier."""

    @pytest.fixture
    def tier(self) -> Iterator[Tier]:
        """A tier that proves its books after the test and is closed twice."""
        tier = self.create_tier(self.capacity_bytes)
        yield tier
        tier.check_integrity()
        tier.close()
        tier.close()

    def fill(self, tier: Tier, num_bytes: int, seed: int) -> tuple[Slot, ByteArray, PageMeta]:
        """A slot with bytes that the seed gives."""
        data, meta = _bytes(num_bytes, seed), make_meta(num_bytes, seed)
        slot = tier.reserve(num_bytes)
        tier.write(slot, data, meta)
        return slot, data, meta

    @pytest.mark.parametrize("num_bytes", [1, 7, 511, 4095, 4096, 4097, 65536])
    def test_bytes_come_back(self, tier: Tier, num_bytes: int) -> None:
        """Any size comes back, twice."""
        slot, data, meta = self.fill(tier, num_bytes, num_bytes)
        for _ in range(2):
            out = np.zeros(num_bytes, np.uint8)
            tier.read(slot, out, meta)
            assert np.array_equal(out, data)
        view = tier.view(slot)
        assert view is None or np.array_equal(view[:num_bytes], data)

    def test_slots_do_not_touch_each_other(self, tier: Tier) -> None:
        """Writing one leaves the others."""
        filled = [self.fill(tier, 1000 + 100 * n, n) for n in range(20)]
        for slot, data, meta in filled:
            out = np.zeros(data.size, np.uint8)
            tier.read(slot, out, meta)
            assert np.array_equal(out, data)

    def test_the_budget_holds_and_a_refusal_changes_nothing(self, tier: Tier) -> None:
        """`reserve` fails at once when full, and only `free` gives room back."""
        slots: list[Slot] = []
        while tier.used_bytes + self.page_bytes <= tier.capacity_bytes:
            try:
                slots.append(tier.reserve(self.page_bytes))
            except TierFullError:  # what is free is smaller than a page and its overhead
                break
            assert tier.used_bytes <= tier.capacity_bytes
        used = tier.used_bytes
        assert used >= len(slots) * self.page_bytes
        with pytest.raises(TierFullError):
            tier.reserve(tier.capacity_bytes)
        assert tier.used_bytes == used
        assert slots
        tier.free(slots.pop())
        slots.append(tier.reserve(self.page_bytes))
        for slot in slots:
            tier.free(slot)
        assert tier.used_bytes == 0

    def test_more_than_the_budget_is_refused(self, tier: Tier) -> None:
        """One byte too many."""
        with pytest.raises(TierFullError):
            tier.reserve(tier.capacity_bytes + 1)
        assert tier.used_bytes == 0

    def test_several_threads(self, tier: Tier) -> None:
        """Slots of different threads stay apart and all room comes back."""
        errors: list[BaseException] = []

        def work(number: int) -> None:
            try:
                for turn in range(20):
                    slot, data, meta = self.fill(tier, 3000 + 500 * number, 100 * number + turn)
                    out = np.zeros(data.size, np.uint8)
                    tier.read(slot, out, meta)
                    assert np.array_equal(out, data)
                    tier.free(slot)
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert errors == []
        assert tier.used_bytes == 0
