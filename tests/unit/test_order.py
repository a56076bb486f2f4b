"""The planner's order of visits against the cheapest of all, against its bound, and as a schedule of a tree."""

from __future__ import annotations

import random
import time

import numpy as np
import pytest
from brute_order import cheapest, random_problem, with_room

from tiercache.errors import PlanError
from tiercache.runtime.ordering import OrderProblem, plan_order
from tiercache.runtime.playing import played_cost
from tiercache.runtime.schedule import batch_tails, best_order, own_order, plan_passes, plan_visits
from tiercache.runtime.tree import Node, Tree


def random_tree(rng, num_nodes):
    """A tree of token nodes, tails and inner nodes mixed under every parent."""
    nodes = [Node(0, -1, 0, np.zeros(8, np.int64))]
    for index in range(1, num_nodes):
        parent = nodes[rng.randrange(max(0, index - 12), index)]
        nodes.append(Node(index, parent.index, parent.end, np.zeros(rng.randint(1, 60), np.int64)))
        parent.children.append(index)
    leaves = [node.index for node in nodes if node.is_leaf]
    return Tree(nodes, leaves, {leaf: nodes[leaf].start for leaf in leaves})


@pytest.mark.parametrize(("num_passes", "enough"), [(1, 1.0), (2, 0.95), (3, 0.95), (4, 0.95)])
def test_the_planner_against_every_order_and_every_choice_of_what_stays(num_passes, enough):
    rng, equal = random.Random(num_passes), 0
    for _ in range(500):
        problem = random_problem(rng, num_passes)
        optimum, planned = cheapest(problem), plan_order(problem, 5.0)
        assert planned.cost >= optimum - 1e-9, "cheaper than any schedule can be"
        assert planned.bound <= optimum + 1e-9, "a bound that a schedule beats"
        assert all(sorted(walk) == sorted(problem.visited) for walk in planned.walks)
        equal += planned.cost <= optimum + 1e-9
    assert equal >= enough * 500


@pytest.mark.parametrize("share", [0.1, 0.3, 0.7])
@pytest.mark.parametrize("shape", ["forest", "bush", "flat"])
def test_a_large_tree_is_planned_fast_and_near_its_bound(shape, share):
    rng, count = random.Random(3), 600
    parents = {
        "forest": lambda n: -1 if n % 8 == 0 else rng.randrange(n // 8 * 8, n),
        "bush": lambda n: rng.randrange(max(0, n - 20), n) if n else -1,
        "flat": lambda n: 0 if n else -1,
    }[shape]
    sizes = [rng.randint(1, 100) for _ in range(count)]
    problem = with_room(
        [parents(n) for n in range(count)], sizes, [s * rng.uniform(0.5, 2) for s in sizes], share
    )
    begin = time.process_time()
    planned = plan_order(problem)
    assert time.process_time() - begin < 1.0
    assert planned.cost <= 1.05 * planned.bound
    unplanned = [list(problem.visited)] * 2
    assert played_cost(problem, planned.walks) < played_cost(problem, unplanned, "lru")


def test_what_is_played_under_the_store_s_policy_is_near_what_was_planned():
    rng, planned_total, played_total, lru_total = random.Random(9), 0.0, 0.0, 0.0
    for _ in range(100):
        problem = random_problem(rng, 2, max_nodes=40, max_leaves=40)
        planned = plan_order(problem)
        played = played_cost(problem, planned.walks)
        assert played >= planned.bound - 1e-9
        planned_total, played_total = planned_total + planned.cost, played_total + played
        lru_total += played_cost(problem, planned.walks, "lru")
    assert played_total <= 1.05 * planned_total
    assert played_total < lru_total


def test_walks_go_back_and_forth():
    problem = with_room([-1, 0, 0, 1, 1], [1, 2, 2, 3, 3], [1, 2, 2, 3, 3], 0.5, num_passes=3)
    first, second, third = plan_order(problem).walks
    assert second == first[::-1]
    assert third == first


def test_a_budget_below_one_path_names_what_it_needs():
    with pytest.raises(PlanError, match="at least 12"):
        OrderProblem(parents=[-1, 0, 1, 0], sizes=[4, 3, 5, 6], costs=[1, 1, 1, 1], capacity=11.5)


@pytest.mark.parametrize(
    "passes", [["step"], ["scores", "gradients"], ["scores", "again", "again", "gradients"]]
)
@pytest.mark.parametrize("seed", range(8))
def test_every_pass_visits_each_tail_once_behind_its_captured_path(passes, seed):
    rng = random.Random(seed)
    tree = random_tree(rng, rng.randint(2, 60))
    page_bytes = [0 if node.is_leaf else 10 * len(node.tokens) for node in tree.nodes]
    least = max(sum(page_bytes[n] for n in tree.path(leaf)) for leaf in tree.branch_start)
    order = best_order(tree, page_bytes, least + 100, len(passes))
    there, tails = set(), [node.index for node in tree.nodes if node.is_leaf]
    for visits in plan_passes(tree, passes, max_visit_tokens=50, order=order):
        seen = []
        for visit in visits:
            above = tree.path(visit.nodes[0])[:-1]
            assert set(above) <= there, "a page is read before it is written, or after it is dropped"
            if visit.kind == "capture":
                assert visit.nodes[0] not in there
                there.add(visit.nodes[0])
            elif visit.kind == "pop":
                there.remove(visit.nodes[0])
                assert not set(tree.nodes[visit.nodes[0]].children) & there
            else:
                seen.extend(visit.nodes)
        assert sorted(seen) == tails
    assert not there or passes[-1] in ("scores", "again")


@pytest.mark.parametrize("passes", ["step", "gradients"])
@pytest.mark.parametrize("seed", range(20))
def test_a_node_is_spent_by_the_last_visit_below_it_and_by_no_other(passes, seed):
    tree = random_tree(random.Random(seed), 80)
    visits = plan_visits(tree, max_visit_tokens=90, passes=passes)
    below = {node.index: [] for node in tree.nodes if not node.is_leaf}
    for at, visit in enumerate(visits):
        for above in tree.path(visit.nodes[0])[:-1]:
            below[above].append(at)
    spent = {node: at for at, visit in enumerate(visits) for node in visit.spent}
    assert spent == {node: max(readers) for node, readers in below.items()}
    assert sum(len(visit.spent) for visit in visits) == len(spent)


def test_walks_that_keep_their_pages_spend_none():
    tree = random_tree(random.Random(0), 40)
    for passes in ("scores", "again"):
        assert not any(visit.spent for visit in plan_visits(tree, max_visit_tokens=90, passes=passes))


def test_the_walk_back_is_the_mirror_of_the_walk_there():
    tree = random_tree(random.Random(4), 40)
    there, back = plan_passes(tree, ["scores", "gradients"], max_visit_tokens=64)
    tails = [[v.nodes for v in walk if v.kind in ("score", "replay")] for walk in (there, back)]
    assert tails[0] == tails[1][::-1]


def test_tails_are_packed_by_the_budget():
    def tree_of(*tails):
        nodes = [Node(0, -1, 0, np.zeros(4, np.int64))]
        nodes += [Node(n + 1, 0, 4, np.zeros(size, np.int64)) for n, size in enumerate(tails)]
        nodes[0].children = list(range(1, len(nodes)))
        return Tree(nodes, nodes[0].children, {})

    assert batch_tails(tree_of(6, 5, 4, 5), [1, 2, 3, 4], 10) == [(1, 3), (2, 4)]
    assert batch_tails(tree_of(*[5] * 5), [1, 2, 3, 4, 5], 10) == [(1, 2), (3, 4), (5,)]
    assert batch_tails(tree_of(30, 2, 3), [1, 2, 3], 10) == [(1,), (2, 3)]
    rng = random.Random(0)
    sizes = [rng.randint(1, 12) for _ in range(200)]
    batches = batch_tails(tree_of(*sizes), list(range(1, 201)), 10)
    assert sorted(leaf for batch in batches for leaf in batch) == list(range(1, 201))
    assert all(len(batch) == 1 or sum(sizes[leaf - 1] for leaf in batch) <= 10 for batch in batches)
    packable = sum(size for size in sizes if size <= 10)
    assert len(batches) <= 1.1 * packable / 10 + sum(size > 10 for size in sizes)


@pytest.mark.parametrize("other", [30, 41])
def test_an_order_of_another_tree_is_refused(other):
    tree, another = random_tree(random.Random(1), 41), random_tree(random.Random(2), other)
    with pytest.raises(PlanError, match="another tree"):
        plan_visits(tree, max_visit_tokens=64, order=own_order(another))
    with pytest.raises(PlanError, match="visit"):
        problem = with_room([-1, 0, 0], [1, 1, 1], [1, 1, 1], 0.5)
        played_cost(problem, [[1], [1]])


@pytest.mark.parametrize(
    "passes", [["gradients"], ["scores", "step"], ["scores", "gradients", "again"], ["again"]]
)
def test_passes_out_of_order_are_refused(passes):
    with pytest.raises(PlanError, match="captured first"):
        plan_passes(random_tree(random.Random(1), 9), passes, max_visit_tokens=8)


def test_the_benchmark_s_figures_are_of_plans_that_can_be_carried_out(bench):
    order = bench("planner_order")
    found = order.bytes_over_bound(quick=True)
    assert 1.0 <= found["bytes_over_bound"] <= found["bytes_over_bound_lru"]
    assert found["bytes_over_bound"] < found["bytes_over_bound_unplanned_lru"]
    assert order.optimal_fraction(20) > 0.8
    assert order.plan_ms()["planned_visits"] > 500
