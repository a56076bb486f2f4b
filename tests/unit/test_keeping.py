"""What `prefix_activations="auto"` chooses for each node: exact, within budgets, and by the price of room."""

from __future__ import annotations

import random
import re
from dataclasses import replace

import dense
import numpy as np
import pytest
import torch
from machines import slow_machine
from plain_model import build_plain
from trees import make_case, pad

from tiercache import open_store
from tiercache.errors import TierFullError
from tiercache.runtime import BranchReplay, prefix_attention
from tiercache.runtime.choosing import Costs, choose_kept
from tiercache.runtime.tier_room import Room
from tiercache.runtime.tree import Node, Tree

FP64 = 1e-12


@pytest.fixture(scope="module")
def costs():
    with open_store("64MiB") as store:
        replay = BranchReplay(
            build_plain(prefix_attention),
            store,
            check_model=False,
            prefix_activations="auto",
            profile=slow_machine(),
        )
        engine = replay.engine
        with engine.running(64, engine.sums, None):
            return Costs(engine.shape(engine.sums), slow_machine())


def chain(*sizes):
    """A chain of captured nodes over one leaf."""
    nodes, start = [], 0
    for index, size in enumerate((*sizes, 4)):
        nodes.append(Node(index, index - 1, start, np.zeros(size, np.int64)))
        start += size
    for node in nodes[:-1]:
        node.children = [node.index + 1]
    return Tree(nodes, [len(sizes)], {len(sizes): start - 4})


def random_tree(rng):
    nodes = [Node(0, -1, 0, np.zeros(rng.randint(1, 40), np.int64))]
    for index in range(1, rng.randint(2, 14)):
        parent = rng.choice(nodes)
        nodes.append(Node(index, parent.index, parent.end, np.zeros(rng.randint(1, 40), np.int64)))
        parent.children.append(index)
    return Tree(nodes, [], {})


def choose(tree, costs, *rooms, **options):
    return choose_kept(tree, costs, rooms, **{"whole_tree": False, "max_live_bytes": 0, **options})


def test_with_room_on_the_device_the_whole_graph_is_kept(costs):
    found = choose(chain(20, 30), costs, Room("device", 1 << 40))
    assert [found[n].kept for n in (0, 1)] == ["all", "all"]
    assert "device" in found[0].reason
    assert found[1].saved_s > found[0].saved_s > 0


@pytest.mark.parametrize(("fresh_s_per_byte", "kept"), [(0.0, "all"), (1.0, "layer_inputs")])
def test_memory_that_is_dear_to_get_is_not_filled_with_graphs(costs, fresh_s_per_byte, kept):
    dear = replace(costs, profile=replace(costs.profile, fresh_s_per_byte=fresh_s_per_byte))
    for live in (0, 1 << 40):  # a node that is computed again whole takes as much memory as one that was kept
        assert choose(chain(30), dear, Room("device", 1 << 40), max_live_bytes=live)[0].kept == kept


def test_where_room_is_scarce_it_goes_to_the_node_that_is_dearest_to_recompute(costs):
    tree = chain(20, 20)
    floor = 2 * costs.pages(20) + 2 * costs.kept("layer_inputs", 20)[0]
    one_more = costs.kept("all", 20)[0] - costs.kept("layer_inputs", 20)[0]
    found = choose(
        tree, costs, Room("device", int((floor + one_more) / 0.75) + 64), allowed=("layer_inputs", "all")
    )
    assert [found[n].kept for n in (0, 1)] == ["layer_inputs", "all"]
    assert "no tier has" in found[0].reason


@pytest.mark.parametrize(("speed", "kept"), [(1e-9, "all"), (1e3, "layer_inputs")])
def test_a_tier_below_is_used_where_it_is_fast_enough(costs, speed, kept):
    rooms = Room("device", 64), Room("host", 1 << 40, speed_s_per_byte=speed, compute_share=0.5)
    found = choose(chain(30), costs, *rooms)
    assert found[0].kept == kept
    assert "host" in found[0].reason


def test_a_node_whose_activations_have_room_in_a_visit_may_leave_nothing(costs):
    tree, nothing = chain(30), Room("device", 64)
    assert choose(tree, costs, nothing, max_live_bytes=1 << 40)[0].kept == "recompute"
    assert choose(tree, costs, nothing, max_live_bytes=16)[0].kept == "layer_inputs"


@pytest.mark.parametrize("whole_tree", [False, True])
@pytest.mark.parametrize("seed", range(30))
def test_what_is_chosen_fits(costs, seed, whole_tree):
    rng = random.Random(seed)
    tree = random_tree(rng)
    kinds = "recompute" if seed % 2 else "layer_inputs"
    least = sum(costs.pages(len(n.tokens)) + costs.kept(kinds, len(n.tokens))[0] for n in tree.nodes)
    sizes = [int(least * rng.uniform(0.2, 2.0)) for _ in range(rng.randint(1, 3))]
    names = ("device", "host", "disk")
    rooms = [
        Room(name, size, 1e-9 * level) for level, (name, size) in enumerate(zip(names, sizes, strict=False))
    ]
    live = 1 << 40 if seed % 2 else 0
    found = choose(tree, costs, *rooms, whole_tree=whole_tree, max_live_bytes=live)
    inner = [n for n in tree.nodes if not n.is_leaf]
    sets = [inner] if whole_tree else [[tree.nodes[i] for i in tree.path(n.index)] for n in inner]
    for nodes in sets:
        chosen = [n for n in nodes if not n.is_leaf]
        load = sum(
            costs.pages(len(n.tokens)) + costs.kept(found[n.index].kept, len(n.tokens))[0] for n in chosen
        )
        floor = sum(costs.pages(len(n.tokens)) + costs.kept(kinds, len(n.tokens))[0] for n in chosen)
        assert load <= max(floor, sum(sizes))


def test_nodes_of_one_step_may_leave_different_things_and_the_gradient_is_exact():
    model, case = build_plain(prefix_attention), make_case("chain_of_5")
    want = dense.weighted_gradients(model, case.rows)
    kept = set()
    for budget in (32_000, 90_000, 160_000):
        model.zero_grad(set_to_none=True)
        with open_store(budget, host=budget) as store:
            options = {**case.options, "prefix_activations": "auto", "profile": slow_machine(host=2e4)}
            replay = BranchReplay(model, store, check_model=False, max_visit_bytes=4096, **options)
            report = replay.backward(case.rows, dense.weighted_sum)
            assert sum(report.kept.values()) == report.num_nodes
            assert set(report.reasons) == set(report.kept)
            assert all(report.reasons.values())
            assert dense.relative_l2(dense.gradients(model), want) < FP64
            kept.add(tuple(sorted(report.kept)))
    assert max(len(names) for names in kept) > 1, f"never a mixture: {kept}"


def test_scoring_without_gradients_leaves_nothing_for_a_pop():
    model, case = build_plain(prefix_attention), make_case("depth_3")
    with open_store("64MiB") as store, torch.no_grad():
        replay = BranchReplay(model, store, check_model=False, **case.options)
        with store.record_accesses() as made:
            replay.logprobs(*pad(case.rows))
    assert {key.kind for _, key in made} == {"key", "value"}


@pytest.mark.parametrize("kept", ["layer_inputs", "recompute", "attention"])
@pytest.mark.parametrize("name", ["depth_3", "chain_of_5"])
def test_a_budget_below_one_path_is_refused_at_once_and_the_named_minimum_is_enough(name, kept):
    model, case = build_plain(prefix_attention), make_case(name)

    def step(budget):
        model.zero_grad(set_to_none=True)
        with open_store(budget) as store:
            replay = BranchReplay(model, store, check_model=False, prefix_activations=kept, **options)
            try:
                replay.backward(case.rows, dense.weighted_sum)
            finally:
                assert store.stats().pages == 0
                puts.append(store.stats().puts)

    puts, options = [], {**case.options, "max_node_tokens": 8, "max_visit_tokens": 8}
    with pytest.raises(TierFullError, match=r"at least \d+") as caught:
        step(3000)
    least = int(re.search(r"at least (\d+)", str(caught.value))[1])
    with pytest.raises(TierFullError, match=f"at least {least}"):
        step(least - 1)
    assert puts == [0, 0], "refused before anything ran"
    step(least)
    assert dense.relative_l2(dense.gradients(model), dense.weighted_gradients(model, case.rows)) < FP64


def test_the_pages_of_one_layer_must_fit_the_device():
    model, case = build_plain(prefix_attention), make_case("depth_3")
    with open_store(1000, host="1MiB") as store:
        replay = BranchReplay(model, store, check_model=False, **case.options)
        with pytest.raises(TierFullError, match=r"device's budget.*at least"):
            replay.backward(case.rows, dense.weighted_sum)
        assert store.stats().puts == 0
