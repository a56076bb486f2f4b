"""Random trees through random stores in every mode: gradients equal, budgets held, nothing left."""

from __future__ import annotations

import functools
import tempfile

import dense
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
from machines import slow_machine
from model_zoo import VOCAB
from pages import check_budgets
from plain_model import build_plain
from trees import ScoredRow, pad

from tiercache import open_store
from tiercache.errors import TierFullError
from tiercache.runtime import BranchReplay, prefix_attention

FP64 = 1e-12
MODES = ["layer_inputs", "recompute", "attention", "all", "auto"]
PAGE = 1024  # of a node of four tokens: one layer's keys or values


@functools.cache
def model():
    return build_plain(prefix_attention, options=[{}, {"window": 6}])


@st.composite
def batches(draw):
    """Rows whose openings are openings of rows before them: a tree of any shape, as numbers that a seed draws from."""
    count = draw(st.integers(1, 6))
    cuts = [
        (draw(st.integers(0, 5)), draw(st.integers(0, 12)), draw(st.integers(1, 9))) for _ in range(count)
    ]
    return cuts, draw(st.integers(0, 99))


def rows_of(batch):
    cuts, seed = batch
    generator = torch.Generator().manual_seed(seed)
    rows, tokens = [], []
    for source, shared, own in cuts:
        opening = (
            tokens[source % len(tokens)][:shared]
            if tokens
            else torch.randint(VOCAB, (12,), generator=generator)
        )
        row = torch.cat([opening, torch.randint(VOCAB, (own + 1,), generator=generator)])
        tokens.append(row)
        scored = torch.rand(len(row), generator=generator) < 0.6
        scored[0] = False
        weights = torch.rand(len(row), dtype=torch.float64, generator=generator)
        rows.append(ScoredRow(row, scored, weights))
    return rows


class ReplayMachine(RuleBasedStateMachine):
    num_steps = 0
    num_full = 0

    @initialize(
        device=st.sampled_from([4, 8, 16, 64, 4096]),
        host=st.sampled_from([None, 16, 4096]),
        disk=st.booleans(),
        policy=st.sampled_from(["planned", "lru"]),
        threads=st.integers(1, 2),
    )
    def open(self, device, host, disk, policy, threads):
        self.folder = tempfile.TemporaryDirectory()
        options = {"policy": policy, "transfer_threads": threads, "timeout_s": 20.0}
        if disk:
            options |= {"disk": self.folder.name, "disk_capacity": "64MiB"}
        self.store = open_store(device * PAGE, host=host * PAGE if host else None, **options)
        self.alive = []

    def teardown(self):
        if hasattr(self, "store"):
            self.alive.clear()
            self.store.close()
            assert set(self.store.stats().bytes_used.values()) == {0}
            self.folder.cleanup()

    def replay(self, mode, node, visit):
        options = {"prefix_activations": mode, "max_node_tokens": node, "max_visit_tokens": visit}
        if mode == "auto":
            options["profile"] = slow_machine()
        return BranchReplay(
            model(), self.store, check_model=False, min_shared_tokens=1, debug=True, **options
        )

    @rule(batch=batches(), mode=st.sampled_from(MODES), node=st.integers(1, 6), visit=st.integers(2, 12))
    def backward(self, batch, mode, node, visit):
        rows = rows_of(batch)
        want = dense.weighted_gradients(model(), rows)
        model().zero_grad(set_to_none=True)
        try:
            self.replay(mode, node, visit).backward(rows, dense.weighted_sum)
        except TierFullError:
            assert not any(p.grad is not None for p in model().parameters())
            ReplayMachine.num_full += 1
        else:
            assert dense.relative_l2(dense.gradients(model()), want) < FP64
            ReplayMachine.num_steps += 1

    @rule(batch=batches(), mode=st.sampled_from(MODES), node=st.integers(1, 6), visit=st.integers(2, 12))
    def forward(self, batch, mode, node, visit):
        if len(self.alive) < 2:
            rows = rows_of(batch)
            try:
                self.alive.append((rows, self.replay(mode, node, visit).logprobs(*pad(rows))))
            except TierFullError:
                ReplayMachine.num_full += 1

    @rule(which=st.integers(0, 1), drop=st.booleans())
    def finish(self, which, drop):
        if len(self.alive) <= which:
            return
        rows, logps = self.alive.pop(which)
        if drop:
            return
        want = dense.weighted_gradients(model(), rows)
        model().zero_grad(set_to_none=True)
        try:
            sum(dense.weighted_sum(logps[n, : len(row.tokens)], row) for n, row in enumerate(rows)).backward()
        except TierFullError:
            ReplayMachine.num_full += 1
        else:
            assert dense.relative_l2(dense.gradients(model()), want) < FP64
            ReplayMachine.num_steps += 1

    @invariant()
    def budgets_hold_and_nothing_is_left(self):
        if not hasattr(self, "store"):
            return
        stats = check_budgets(self.store)
        if not self.alive:
            assert stats.pages == 0


_SETTINGS = settings(deadline=None, suppress_health_check=list(HealthCheck))


def test_replays_through_any_store():
    """Few examples, and more of them only while chance drew too little room for whole steps."""
    enough = ReplayMachine.num_steps + 5
    for _ in range(8):
        run_state_machine_as_test(
            ReplayMachine, settings=settings(_SETTINGS, stateful_step_count=5, max_examples=16)
        )
        if ReplayMachine.num_steps >= enough:
            break
    assert ReplayMachine.num_steps >= enough, "steps that were carried out"


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_replays_through_any_store_for_long():
    before, full = ReplayMachine.num_steps, ReplayMachine.num_full
    run_state_machine_as_test(
        ReplayMachine, settings=settings(_SETTINGS, stateful_step_count=12, max_examples=300)
    )
    assert ReplayMachine.num_steps - before >= 300
    assert ReplayMachine.num_full > full, "no budget was ever too small"
