"""The store against a dict: whatever is done to it, reads give what was put and no budget is ever exceeded."""

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)
from pages import PAGE, check_budgets, grad, key, small_store

from tiercache import AccessPlan
from tiercache.errors import PageMissingError, PageStateError, TierFullError

NUMBERS = st.integers(0, 7)
SIZES = st.sampled_from([4, PAGE // 2, PAGE, 2 * PAGE])


class StoreMachine(RuleBasedStateMachine):
    num_closed = 0

    @initialize(
        device=st.integers(2, 5),
        host=st.sampled_from([None, 2, 3]),
        disk=st.sampled_from([None, 4, 40]),
        policy=st.sampled_from(["lru", "planned"]),
        codec=st.sampled_from(["raw", "zstd"]),
    )
    def open(self, device, host, disk, policy, codec):
        self.store = small_store(device, host, disk, policy=policy, codec=codec)
        self.pages = {}
        self.refs = {}
        self.sums = {}
        self.leases = []

    def teardown(self):
        if hasattr(self, "store"):
            for _, lease, _ in self.leases:
                lease.release()
            self.store.close()
            assert set(self.store.stats().bytes_used.values()) == {0}
            StoreMachine.num_closed += 1

    @rule(n=NUMBERS, size=SIZES, value=st.integers(0, 1000), own=st.booleans())
    def put(self, n, size, value, own):
        if n in self.pages:
            assert not self.store.put(key(n), self.pages[n])
            self.refs[n] += 1
            return
        tensor = torch.full((size // 4,), float(value))
        try:
            assert self.store.put(key(n), tensor.clone(), own=own)
        except TierFullError:
            assert not self.store.contains(key(n))
        else:
            self.pages[n], self.refs[n] = tensor, 1

    @rule(n=NUMBERS, keep=st.booleans())
    def read(self, n, keep):
        try:
            lease = self.store.read(key(n))
        except PageMissingError:
            assert n not in self.pages
            return
        except TierFullError:
            return
        assert torch.equal(lease.tensor, self.pages[n])
        if keep and len(self.leases) < 2:
            self.leases.append((n, lease, self.pages[n]))
        else:
            lease.release()

    @rule()
    def release(self):
        if self.leases:
            self.leases.pop(0)[1].release()

    @rule(n=NUMBERS, value=st.integers(-5, 5))
    def accumulate(self, n, value):
        addend = torch.full((PAGE // 4,), float(value), dtype=torch.bfloat16)
        try:
            self.store.accumulate(grad(n), addend)
        except TierFullError:
            return
        self.sums[n] = self.sums.get(n, 0.0) + value

    @rule(n=NUMBERS)
    def take_sum(self, n):
        total = self.store.take(grad(n))
        assert (total is None) == (n not in self.sums)
        if total is not None:
            assert bool((total == self.sums.pop(n)).all())

    @rule(n=NUMBERS)
    def take_page(self, n):
        try:
            taken = self.store.take(key(n))
        except PageStateError:
            assert any(number == n for number, _, _ in self.leases)
            return
        assert (taken is None) == (n not in self.pages)
        if taken is not None:
            assert torch.equal(taken, self.pages[n])
            self._drop(n)

    @rule(n=NUMBERS)
    def discard(self, n):
        self.store.discard([key(n)])
        if n in self.pages:
            self._drop(n)

    @rule()
    def discard_graph(self):
        self.store.discard(graph=1)
        self.sums.clear()

    @rule(numbers=st.lists(NUMBERS, max_size=4))
    def prefetch(self, numbers):
        self.store.prefetch([key(n) for n in numbers])

    @rule(numbers=st.none() | st.lists(NUMBERS, max_size=12))
    def follow(self, numbers):
        plan = None
        if numbers is not None:
            plan = AccessPlan()
            for n in numbers:
                plan.add("accumulate" if n % 3 == 0 else "read", grad(n) if n % 3 == 0 else key(n))
        self.store.follow(plan)

    @rule()
    def flush(self):
        self.store.flush()

    def _drop(self, n):
        self.refs[n] -= 1
        if not self.refs[n]:
            del self.pages[n], self.refs[n]

    @invariant()
    def books_and_budgets_hold(self):
        if not hasattr(self, "store"):
            return
        stats = check_budgets(self.store)
        assert stats.pages == len(self.pages) + len(self.sums)
        for _, lease, expected in self.leases:
            assert torch.equal(lease.tensor, expected)
        for n in range(8):
            assert self.store.contains(key(n)) == (n in self.pages)


_SETTINGS = settings(stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck))

StoreMachine.TestCase.settings = settings(_SETTINGS, max_examples=30)
TestStoreMachine = StoreMachine.TestCase


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_store_machine_for_long():
    before = StoreMachine.num_closed
    run_state_machine_as_test(StoreMachine, settings=settings(_SETTINGS, max_examples=2000))
    assert StoreMachine.num_closed - before >= 2000, "stores that were used and left empty"
