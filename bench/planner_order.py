"""The order of visits: bytes over the bound, how often the optimum is met, and what planning takes."""

from __future__ import annotations

import random
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from tiercache.runtime.ordering import OrderProblem, lower_bound, plan_order
from tiercache.runtime.playing import played_cost
from tiercache.runtime.schedule import best_order, plan_passes
from tiercache.runtime.tree import Node, Tree

ROOT = Path(__file__).parent.parent
_PAGE_BYTES = 73_728  # of a token: keys and values of an 8B model in bf16, halved by grouping


def order_fields(*, quick: bool) -> dict[str, Any]:
    """`bytes_over_bound` (also of LRU, and of an order repeated), `optimal_fraction`, `plan_ms_per_1k_visits`."""
    return {
        **bytes_over_bound(quick=quick),
        "optimal_fraction": optimal_fraction(60 if quick else 500),
        **plan_ms(),
    }


def rollouts(seed: int, *, groups: int, turns: int, branches: int) -> Tree:
    """Groups of agent rollouts: a prompt of a few nodes, turns that fork, tails at the ends."""
    rng = random.Random(seed)
    nodes: list[Node] = []

    def add(parent: int, tokens: int) -> int:
        start = nodes[parent].end if parent >= 0 else 0
        nodes.append(Node(len(nodes), parent, start, np.zeros(tokens, np.int64)))
        if parent >= 0:
            nodes[parent].children.append(nodes[-1].index)
        return len(nodes) - 1

    for _ in range(groups):
        at = add(-1, rng.randint(512, 4096))
        open_ends = [at]
        for _ in range(turns):
            at = rng.choice(open_ends)
            open_ends.append(add(at, rng.randint(128, 2048)))
        for end in open_ends:
            for _ in range(rng.randint(1, branches)):
                add(end, rng.randint(64, 1024))
    leaves = [node.index for node in nodes if node.is_leaf]
    return Tree(nodes, leaves, {leaf: nodes[leaf].start for leaf in leaves})


def problem_of(tree: Tree, share: float, num_passes: int = 2) -> OrderProblem:
    """The tree's pages, with room for the longest path and this share of the rest."""
    inner = [node for node in tree.nodes if not node.is_leaf]
    rank = {node.index: k for k, node in enumerate(inner)}
    sizes = [len(node.tokens) * _PAGE_BYTES for node in inner]
    visited = [rank[n.index] for n in inner if any(tree.nodes[c].is_leaf for c in n.children)]
    parents = [rank.get(node.parent, -1) for node in inner]
    given = {"parents": parents, "sizes": sizes, "costs": sizes, "visited": visited, "num_passes": num_passes}
    roomy = OrderProblem(capacity=float(sum(sizes)), **given)
    least = max(roomy.path_sizes[node] for node in visited)
    return OrderProblem(capacity=least + share * (sum(sizes) - least), **given)


def workloads(*, quick: bool) -> Iterator[OrderProblem]:
    """Two walks over small and large batches, with little to much room."""
    shapes = [(4, 6, 4), (16, 8, 4)] if quick else [(1, 12, 4), (4, 6, 4), (16, 8, 4), (64, 12, 4)]
    for seed, (groups, turns, branches) in enumerate(shapes):
        for share in (0.1, 0.3, 0.6):
            yield problem_of(rollouts(seed, groups=groups, turns=turns, branches=branches), share)


def bytes_over_bound(*, quick: bool) -> dict[str, Any]:
    """Mean over the workloads of bytes loaded, as the store's policy plays them, over the bound."""
    found: dict[str, list[float]] = {"": [], "_lru": [], "_unplanned": [], "_unplanned_lru": []}
    for problem in workloads(quick=quick):
        bound, planned = lower_bound(problem), plan_order(problem)
        unplanned = [list(problem.visited)] * problem.num_passes
        found[""].append(played_cost(problem, planned.walks) / bound)
        found["_lru"].append(played_cost(problem, planned.walks, "lru") / bound)
        found["_unplanned"].append(played_cost(problem, unplanned) / bound)
        found["_unplanned_lru"].append(played_cost(problem, unplanned, "lru") / bound)
    means = {f"bytes_over_bound{name}": round(statistics.mean(ratios), 4) for name, ratios in found.items()}
    return means | {"bytes_over_bound_worst": round(max(found[""]), 4)}


def optimal_fraction(count: int) -> float:
    """Share of random trees of up to 9 nodes and 5 leaves whose plan is as cheap as the cheapest schedule of all."""
    sys.path.insert(0, str(ROOT / "tests"))
    from brute_order import cheapest, random_problem

    rng, equal = random.Random(2), 0
    for _ in range(count):
        problem = random_problem(rng)
        equal += plan_order(problem, 5.0).cost <= cheapest(problem) + 1e-9
    return round(equal / count, 4)


def plan_ms() -> dict[str, Any]:
    """Milliseconds to order two walks and list their visits, for a thousand visits; the median of seven."""
    tree = rollouts(5, groups=40, turns=6, branches=3)
    page_bytes = [0 if node.is_leaf else len(node.tokens) * _PAGE_BYTES for node in tree.nodes]
    room = (
        max(sum(page_bytes[n] for n in tree.path(leaf)) for leaf in tree.branch_start) + sum(page_bytes) // 3
    )
    times, count = [], 0
    for _ in range(7):
        begin = time.perf_counter()
        order = best_order(tree, page_bytes, room, 2)
        walks = plan_passes(tree, ["scores", "gradients"], max_visit_tokens=2048, order=order)
        times.append(1e3 * (time.perf_counter() - begin))
        count = sum(map(len, walks))
    return {
        "plan_ms_per_1k_visits": round(1e3 * statistics.median(times) / count, 1),
        "planned_visits": count,
    }
