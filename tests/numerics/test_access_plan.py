"""The access plan equals what the run did, access by access."""

from __future__ import annotations

import pytest
import torch
from dense import gradients, relative_l2, weighted_sum
from machines import slow_machine
from model_zoo import WINDOW
from plain_model import Block, build_plain, rotate
from runs import dense_objective
from torch.nn.functional import gelu
from trees import NAMES, make_case, pad

from tiercache import open_store
from tiercache.errors import ConfigError
from tiercache.plan import AccessPlan
from tiercache.runtime import BranchReplay, prefix_attention
from tiercache.runtime.engine import Engine


class _Plans:
    """Keeps the plans that a store is told to follow."""

    def __init__(self, store, monkeypatch: pytest.MonkeyPatch) -> None:
        self.plans: list[AccessPlan] = []
        follow = store.follow

        def keep(plan: AccessPlan | None) -> None:
            if plan is not None:
                self.plans.append(plan)
            follow(plan)

        monkeypatch.setattr(store, "follow", keep)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"prefix_activations": "recompute"},
        {"prefix_activations": "attention"},
        {"prefix_activations": "all"},
        {"prefix_activations": "auto", "profile": slow_machine()},
        {"prefix_gradient": "detached"},
        {"prefix_gradient": 3},
        {"debug": True},
    ],
    ids=lambda options: "-".join(map(str, options.values())) if "profile" not in options else "auto",
)
def test_plan_equals_the_run(name: str, options: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_case(name)
    model = build_plain(prefix_attention, options=[{}, {"window": WINDOW}, {}])
    with open_store("64MiB") as store:
        replay = BranchReplay(
            model, store, check_model=False, **{"min_shared_tokens": 1, **case.options, **options}
        )
        plans = _Plans(store, monkeypatch)
        with store.record_accesses() as record:
            replay.backward(case.rows, weighted_sum)
        planned = [(access.operation, access.key) for access in plans.plans[0].accesses]
        assert planned == list(record)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kept", ["layer_inputs", "recompute", "attention", "all"])
def test_keys_and_values_go_in_the_backward_that_reads_them_last(name: str, kept: str) -> None:
    """While sums come, layer by layer, so that the two are never there together."""
    case = make_case(name)
    model = build_plain(prefix_attention, options=[{}, {"window": WINDOW}, {}])
    with open_store("64MiB") as store:
        replay = BranchReplay(
            model,
            store,
            check_model=False,
            prefix_activations=kept,
            **{"min_shared_tokens": 1, **case.options},
        )
        with store.record_accesses() as record:
            replay.backward(case.rows, weighted_sum)
        made = list(record)
        assert not any(store.stats().bytes_used.values())
    last_read = {key: at for at, (operation, key) in enumerate(made) if operation == "read"}
    discarded = {key: at for at, (operation, key) in enumerate(made) if operation == "discard"}
    pages = [key for key in last_read if key.kind in ("key", "value")]
    assert pages or not any(operation == "put" for operation, _ in made)
    for key in pages:
        between = made[last_read[key] + 1 : discarded[key]]
        assert all(other.layer == key.layer for _, other in between), f"{key} outlives its layer's backward"


def _attends_twice(self, x, angle, attention):
    """A block whose output is the difference of two attentions over the same keys and values."""
    heads = self.qkv(self.norm_1(x)).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
    q, k, v = heads.split([self.heads, self.kv_heads, self.kv_heads], dim=1)
    q, k = rotate(q, angle), rotate(k, angle)
    one, two = (attention(q * s, k, v, layer=self.layer, **self.options) for s in (1.0, 0.5))
    x = x + self.out((one - 0.3 * two).transpose(1, 2).flatten(2))
    return x + self.down(gelu(self.up(self.norm_2(x))))


@pytest.mark.parametrize("kept", ["layer_inputs", "recompute", "all", "attention"])
def test_a_layer_that_attends_twice_keeps_its_pages_until_the_second_backward(
    kept: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Block, "forward", _attends_twice)
    model, case = build_plain(prefix_attention), make_case("depth_3")
    _, want = dense_objective(model, case.rows, torch.sum)
    model.zero_grad(set_to_none=True)
    with open_store("64MiB") as store:
        replay = BranchReplay(model, store, check_model=False, prefix_activations=kept, **case.options)
        plans = _Plans(store, monkeypatch)
        if kept == "attention":
            with pytest.raises(ConfigError, match="attends more than once"):
                replay.backward(case.rows, weighted_sum)
            return
        with store.record_accesses() as record:
            logps = replay.logprobs(*pad(case.rows))
            logps.sum().backward()
        assert [(a.operation, a.key) for a in plans.plans[0].accesses] == list(record)
        assert not any(store.stats().bytes_used.values())
    assert relative_l2(gradients(model), want) < 1e-12


def test_plan_of_logprobs_covers_both_walks(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build_plain(prefix_attention)
    ids = torch.tensor([[1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 7, 8]])
    with open_store("64MiB") as store:
        replay = BranchReplay(model, store, check_model=False, min_shared_tokens=1)
        plans = _Plans(store, monkeypatch)
        with store.record_accesses() as record:
            scored = torch.zeros_like(ids, dtype=torch.bool)
            scored[:, 4:] = True
            replay.logprobs(ids, None, scored).sum().backward()
        forward, backward = ([(a.operation, a.key) for a in plan.accesses] for plan in plans.plans)
        assert forward == list(record)
        assert forward[-len(backward) :] == backward


def test_two_walks_over_more_pages_than_the_device_holds_are_ordered(monkeypatch: pytest.MonkeyPatch) -> None:
    model, case = build_plain(prefix_attention), make_case("depth_3")
    want_logps, want = dense_objective(model, case.rows, torch.sum)
    orders, kept = [], Engine._order
    monkeypatch.setattr(Engine, "_order", lambda *args: orders.append(kept(*args)) or orders[-1])
    model.zero_grad(set_to_none=True)
    with open_store(28_000, host="1MiB") as store:
        options = {"check_model": False, **case.options, "max_visit_tokens": 8}
        replay = BranchReplay(model, store, **options)
        plans = _Plans(store, monkeypatch)
        with store.record_accesses() as record:
            logps = replay.logprobs(*pad(case.rows))
            logps.sum().backward()
        assert [(a.operation, a.key) for a in plans.plans[0].accesses] == list(record)
        assert store.stats().deviations == 0
    assert orders[0] is not None
    assert (logps.detach() - want_logps).abs().max() < 1e-12
    assert relative_l2(gradients(model), want) < 1e-12
