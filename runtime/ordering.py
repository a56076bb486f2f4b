"""The order of visits over a tree of pages that is walked several times: back and forth, in which order of children.

A visit needs all pages of its path at once; loading a page costs its reload. In one walk any depth-first order loads
each page once. At a turn from one walk to the next, what is resident is used first: so walks go back and forth, and the
children's order decides what can be resident. Counted from the turn outwards, the k-th visit's path and the pages that
are kept beyond it must fit together: keeping is a knapsack whose room changes with k, solved here for each order
that is tried. A walk in which each page is loaded once may be mirrored at the turn
without loss, so only one order is searched for.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from tiercache.errors import PlanError
from tiercache.runtime.knapsack import fractional_value, nested_value

Order = list[int]
_EXHAUSTIVE = 720  # orders of a tree that are all tried


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderProblem:
    """Walks over one tree of pages, or over several (a forest).

    Attributes:
        parents: of each node, parents before children, -1 at a root.
        sizes: bytes of each node's pages.
        costs: seconds, or any other unit, to load them.
        visited: nodes that have something to visit; leaves by default.
        capacity: bytes that may be resident.
        num_passes: walks.
        children: of each node.
        path_sizes, path_costs: of each node and all above it, together.

    Raises:
        PlanError: no tree, or a capacity below one path.
    """

    parents: Sequence[int]
    sizes: Sequence[float]
    costs: Sequence[float]
    capacity: float
    num_passes: int = 2
    visited: Sequence[int] = ()
    children: list[list[int]] = field(init=False)
    path_sizes: list[float] = field(init=False)
    path_costs: list[float] = field(init=False)

    def __post_init__(self) -> None:
        children: list[list[int]] = [[] for _ in self.parents]
        sizes, costs = list(self.sizes), list(self.costs)
        for node, parent in enumerate(self.parents):
            if not -1 <= parent < node:
                raise PlanError("order: a parent comes after its child", got=f"{parent} of {node}")
            if parent >= 0:
                children[parent].append(node)
                sizes[node] += sizes[parent]
                costs[node] += costs[parent]
        object.__setattr__(self, "children", children)
        object.__setattr__(self, "path_sizes", sizes)
        object.__setattr__(self, "path_costs", costs)
        if not self.visited:
            object.__setattr__(self, "visited", [n for n, below in enumerate(children) if not below])
        least = max((sizes[node] for node in self.visited), default=0)
        if self.capacity < least:
            raise PlanError(
                "order: the pages of one path do not fit",
                got=f"capacity {self.capacity}",
                limit=f"at least {least}",
                remedy="raise the budget, or cut the tree into shorter paths",
            )

    @property
    def roots(self) -> list[int]:
        """Nodes without a parent."""
        return [node for node, parent in enumerate(self.parents) if parent < 0]

    def path(self, node: int) -> list[int]:
        """A node and all above it, upwards."""
        path = []
        while node >= 0:
            path.append(node)
            node = self.parents[node]
        return path


@dataclass(frozen=True, slots=True)
class PlannedOrder:
    """Walks, what they load, and what no order could avoid.

    Attributes:
        walks: nodes visited in each pass, in order.
        children: of each node in the order of the first pass; a node itself stands where its own visit comes.
        roots: in the order of the first pass.
        cost: of all loads, with pages kept as the search found best.
        bound: that no order and no eviction can go below.
        tried: orders that were looked at.
    """

    walks: list[Order]
    children: list[list[int]]
    roots: list[int]
    cost: float
    bound: float
    tried: int


def plan_order(problem: OrderProblem, time_limit_s: float = 0.05) -> PlannedOrder:
    """The best order found: exhaustively for small trees, else by a greedy start and local search within the limit."""
    deadline = time.perf_counter() + time_limit_s
    bound = lower_bound(problem)
    best = _Layout(problem)
    best_cost, tried = best.cost(), 1
    if problem.num_passes > 1 and best_cost > bound * (1 + 1e-12):
        for layout in _candidates(problem):
            cost = layout.cost()
            tried += 1
            if cost < best_cost - 1e-12:
                best, best_cost = layout, cost
            if best_cost <= bound * (1 + 1e-12) or time.perf_counter() > deadline:
                break
        else:
            if not _is_small(problem):
                best, best_cost, more = _improve(best, best_cost, bound, deadline)
                tried += more
    first = best.walk()
    walks = [first if p % 2 == 0 else first[::-1] for p in range(problem.num_passes)]
    return PlannedOrder(walks, best.children, best.roots, best_cost, min(bound, best_cost), tried)


class _Layout:
    """One order of children. A node that is visited itself stands among its own children."""

    def __init__(
        self, problem: OrderProblem, children: list[list[int]] | None = None, roots: list[int] | None = None
    ) -> None:
        self.problem = problem
        visited = set(problem.visited)
        self.children = children or [
            [*([node] if node in visited else []), *below] for node, below in enumerate(problem.children)
        ]
        self.roots = roots or problem.roots

    def walk(self) -> Order:
        """Nodes in the order of their visits in the first pass."""
        order: Order = []
        stack = [(root, False) for root in reversed(self.roots)]
        while stack:
            node, is_visit = stack.pop()
            if is_visit:
                order.append(node)
            else:
                stack.extend((below, below == node) for below in reversed(self.children[node]))
        return order

    def cost(self) -> float:
        """Of all loads when each turn keeps what it is best to keep."""
        problem, order = self.problem, self.walk()
        total = problem.num_passes * sum(problem.costs)
        held = [0.0] * len(
            order
        )  # of each visit of the walk before the turn, by pages kept from the turn before
        for turn in range(problem.num_passes - 1):
            near = order[::-1] if turn % 2 == 0 else order
            value, kept = self._turn(near, held[::-1] if turn % 2 == 0 else held)
            total -= value
            # seen from the next turn: visits that a page kept over this one still waits through
            held = [0.0] * len(order)
            for distance, size in kept:
                for k in range(distance):
                    held[k if turn % 2 else len(order) - 1 - k] += size
        return total

    def _turn(self, near: Order, held: list[float]) -> tuple[float, list[tuple[int, float]]]:
        """What keeping saves at a turn, and (visits waited through, bytes) of each page kept."""
        problem = self.problem
        seen: set[int] = set()
        rooms: list[float] = []
        items: list[list[tuple[float, float]]] = []
        for k, node in enumerate(near):
            new, at = [], node
            while at >= 0 and at not in seen:
                seen.add(at)
                new.append((problem.sizes[at], problem.costs[at]))
                at = problem.parents[at]
            rooms.append(problem.capacity - problem.path_sizes[node] - held[k])
            items.append(new)
        free = sum(cost for _, cost in items[0])
        value, kept = nested_value(items[1:], rooms[1:], first_room=rooms[0])
        return free + value, [(k + 1, size) for k, size in kept]


def _is_small(problem: OrderProblem) -> bool:
    return _num_orders(problem) <= _EXHAUSTIVE


def _num_orders(problem: OrderProblem) -> int:
    layout, count = _Layout(problem), math.factorial(min(len(problem.roots), 10))
    for below in layout.children:
        count *= math.factorial(min(len(below), 10))
        if count > _EXHAUSTIVE:
            break
    return count


def _candidates(problem: OrderProblem) -> Iterator[_Layout]:
    """Every order of a small tree; of a larger one, for each place of the turn, the best-looking one."""
    start = _Layout(problem)
    if _is_small(problem):
        for choice in itertools.product(
            *(itertools.permutations(below) for below in start.children), itertools.permutations(start.roots)
        ):
            yield _Layout(problem, [list(below) for below in choice[:-1]], list(choice[-1]))
        return
    weights = _worth(problem)
    turns = sorted(problem.visited, key=lambda node: -problem.path_costs[node])
    for turn in turns:
        yield _towards(start, turn, weights)


def _worth(problem: OrderProblem) -> list[float]:
    """Cost a byte of each node's dearest subtree, by which it is worth being near the turn."""
    worth = [cost / max(size, 1e-9) for size, cost in zip(problem.sizes, problem.costs, strict=True)]
    for node in reversed(range(len(worth))):
        parent = problem.parents[node]
        if parent >= 0:
            worth[parent] = max(worth[parent], worth[node])
    return worth


def _towards(start: _Layout, turn: int, worth: list[float]) -> _Layout:
    """The layout whose first pass ends at `turn`, the worthiest siblings just before it."""
    last = set(start.problem.path(turn))

    def key(parent: int, node: int) -> tuple[bool, float]:
        # a node's own visit needs nothing beyond its path
        is_last = node in last if node != parent else node == turn
        return is_last, worth[node] if node != parent else math.inf

    children = [sorted(below, key=lambda n, p=p: key(p, n)) for p, below in enumerate(start.children)]  # type: ignore[misc]
    return _Layout(start.problem, children, sorted(start.roots, key=lambda node: key(-1, node)))


def _improve(best: _Layout, best_cost: float, bound: float, deadline: float) -> tuple[_Layout, float, int]:
    """Moves one child at a time to either end of its siblings while that pays and time is left."""
    tried, improved = 0, True
    while improved:
        improved = False
        for parent in range(-1, len(best.children)):
            siblings = best.roots if parent < 0 else best.children[parent]
            for node, at in itertools.product(list(siblings), (0, len(siblings) - 1)):
                if time.perf_counter() > deadline or best_cost <= bound * (1 + 1e-12):
                    return best, best_cost, tried
                if len(siblings) < 2 or siblings[at] == node:
                    continue
                moved = [n for n in siblings if n != node]
                moved.insert(at, node)
                children = [moved if p == parent else below for p, below in enumerate(best.children)]
                layout = _Layout(best.problem, children, moved if parent < 0 else best.roots)
                cost, tried = layout.cost(), tried + 1
                if cost < best_cost - 1e-12:
                    best, best_cost, improved, siblings = layout, cost, True, moved
    return best, best_cost, tried


def lower_bound(problem: OrderProblem) -> float:
    """What every schedule loads: each page once, and in each later pass all that cannot be resident at its turn.

    The path of the last visit before a turn is resident at it, so it is pinned; the rest of the room is filled by
    fractions of pages, the dearest a byte first.
    """
    total = float(sum(problem.costs))
    if problem.num_passes == 1 or not problem.visited:
        return total
    sizes, costs = np.asarray(problem.sizes, np.float64), np.asarray(problem.costs, np.float64)
    best_first = np.argsort(-costs / np.maximum(sizes, 1e-12), kind="stable")
    saved = 0.0
    for node in problem.visited:
        rest = np.ones(len(sizes), np.bool_)
        rest[problem.path(node)] = False
        chosen = best_first[rest[best_first]]
        room = problem.capacity - problem.path_sizes[node]
        saved = max(saved, problem.path_costs[node] + fractional_value(sizes[chosen], costs[chosen], room))
    return total + (problem.num_passes - 1) * (total - saved)
