"""A reference model of the disk tier: a dict. Whatever is done in whatever order, the tier answers as the dict does."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import numpy as np
from disk_pages import MIB, data_of, key_of, meta_of
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tiercache.errors import TierFullError
from tiercache.tiers.disk import DiskTier

NUMBERS = st.integers(0, 11)
SIZES = st.sampled_from([1, 4095, 4096, 4097, 60_000, 300_000, MIB + 1])


class DiskMachine(RuleBasedStateMachine):
    """Persistent and passing records, overwritten keys, removals, reopening, injected short and late I/O."""

    def __init__(self) -> None:
        super().__init__()
        shared = Path("/dev/shm")
        self.root = Path(tempfile.mkdtemp(dir=shared if shared.is_dir() else None))
        self.kept: dict[int, int] = {}  # number -> size, by key
        self.claimed: set[int] = set()  # of kept: what this opening wrote or looked up
        self.passing: dict[int, tuple[object, int]] = {}
        self.open()

    def open(self) -> None:
        self.tier = DiskTier(
            self.root, 4 * MIB, durability="process", segment_bytes=MIB, faults=True, engine="threads"
        )

    def put(self, number: int, num_bytes: int, *, persistent: bool):
        used_bytes = self.tier.used_bytes
        try:
            self.tier.make_room(num_bytes, timeout_s=5)
            self.forget_what_gave_way(used_bytes + num_bytes)
            slot = self.tier.reserve(num_bytes)
        except TierFullError:
            assert self.tier.used_bytes + num_bytes + 8192 > self.tier.capacity_bytes // 4
            return None
        self.tier.write(slot, data_of(number, num_bytes), meta_of(number, num_bytes, persistent=persistent))
        return slot

    def forget_what_gave_way(self, wanted_bytes: int) -> None:
        """Records that nobody claims may go when room is made, if it was short; no others."""
        for number in self.kept.keys() - self.claimed:
            found = self.tier.lookup(key_of(number).digest)
            if found is not None:
                self.tier.let_go(found[0])
            else:
                assert wanted_bytes + 8192 > self.tier.capacity_bytes // 4
                del self.kept[number]

    @rule(number=NUMBERS, num_bytes=SIZES)
    def keep(self, number: int, num_bytes: int) -> None:
        if number in self.kept:
            self.remove(number)
        if self.put(number, num_bytes, persistent=True) is not None:
            self.kept[number] = num_bytes
            self.claimed.add(number)

    @rule(number=NUMBERS, num_bytes=SIZES)
    def pass_through(self, number: int, num_bytes: int) -> None:
        if number in self.passing:
            self.tier.free(self.passing.pop(number)[0])
        slot = self.put(number + 100, num_bytes, persistent=False)
        if slot is not None:
            self.passing[number] = (slot, num_bytes)

    @rule(number=NUMBERS)
    def remove(self, number: int) -> None:
        assert self.tier.remove(key_of(number).digest) == (number in self.kept)
        self.kept.pop(number, None)
        self.claimed.discard(number)

    @rule(number=NUMBERS, shift=st.integers(0, 1))
    def read(self, number: int, shift: int) -> None:
        found = self.tier.lookup(key_of(number).digest)
        assert (found is not None) == (number in self.kept)
        if found is not None:
            self.claimed.add(number)
            slot, meta = found
            assert slot.num_bytes == self.kept[number]
            out = np.empty(slot.num_bytes + shift, np.uint8)[shift:]
            self.tier.read(slot, out, meta)
            assert np.array_equal(out, data_of(number, slot.num_bytes))
        if number in self.passing:
            slot, num_bytes = self.passing[number]
            out = np.empty(num_bytes, np.uint8)
            self.tier.read(slot, out, meta_of(number + 100, num_bytes, persistent=False))
            assert np.array_equal(out, data_of(number + 100, num_bytes))

    @rule(kind=st.sampled_from(["read", "write"]), cut=st.sampled_from([100, 4096, 50_000]))
    def cut_short(self, kind: str, cut: int) -> None:
        self.tier.core.add_fault(kind, "short", bytes=cut, times=2)

    @rule(kind=st.sampled_from(["read", "write"]))
    def reorder(self, kind: str) -> None:
        self.tier.core.add_fault(kind, "reorder", hold=2, times=3)

    @precondition(lambda self: self.kept or self.passing)
    @rule()
    def reopen(self) -> None:
        self.tier.close()
        self.passing.clear()
        self.claimed.clear()
        self.open()

    @invariant()
    def books_add_up(self) -> None:
        sizes = [*self.kept.values(), *(size for _, size in self.passing.values())]
        assert self.tier.used_bytes == sum(4096 + -(-size // 4096) * 4096 for size in sizes)
        assert self.tier.used_bytes <= self.tier.capacity_bytes
        assert sum(path.stat().st_size for path in (self.root / "drive0").iterdir()) <= 4 * MIB
        self.tier.check_integrity()

    def teardown(self) -> None:
        self.tier.close()
        shutil.rmtree(self.root)


TestDiskMachine = DiskMachine.TestCase
TestDiskMachine.settings = settings(max_examples=25, stateful_step_count=25, deadline=None)
