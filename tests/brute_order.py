"""The cheapest schedule of all: every order of visits and every choice of what stays, by dynamic programming."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numba
import numpy as np
import numpy.typing as npt

from tiercache.runtime.ordering import OrderProblem

_NEVER = 1e300


def cheapest(problem: OrderProblem) -> float:
    """Least cost of all loads of the problem's passes, from an empty start."""
    count = len(problem.parents)
    paths = np.array([sum(1 << n for n in problem.path(v)) for v in problem.visited], np.int64)
    sizes, costs = np.zeros(1 << count), np.zeros(1 << count)
    for mask in range(1 << count):
        members = [n for n in range(count) if mask >> n & 1]
        sizes[mask] = sum(problem.sizes[n] for n in members)
        costs[mask] = sum(problem.costs[n] for n in members)
    return float(_cheapest(paths, sizes, costs, float(problem.capacity), problem.num_passes))


@numba.njit
def _cheapest(
    paths: npt.NDArray[np.int64],
    sizes: npt.NDArray[np.float64],
    costs: npt.NDArray[np.float64],
    capacity: float,
    passes: int,
) -> float:
    leaves, residents = len(paths), len(sizes)
    start = np.full(residents, _NEVER)
    start[0] = 0.0
    for _ in range(passes):
        least = np.full((1 << leaves, residents), _NEVER)
        least[0] = start
        for seen in range((1 << leaves) - 1):
            for resident in range(residents):
                so_far = least[seen, resident]
                if so_far >= _NEVER:
                    continue
                for leaf in range(leaves):
                    if seen >> leaf & 1:
                        continue
                    path = paths[leaf]
                    cost = so_far + costs[path & ~resident]
                    rest = resident & ~path
                    room = capacity - sizes[path]
                    after = seen | (1 << leaf)
                    stays = rest
                    while True:  # every subset of the rest
                        if sizes[stays] <= room and cost < least[after, path | stays]:
                            least[after, path | stays] = cost
                        if stays == 0:
                            break
                        stays = (stays - 1) & rest
        start = least[(1 << leaves) - 1]
    return start.min()


def random_problem(
    rng: random.Random, num_passes: int = 2, max_nodes: int = 9, max_leaves: int = 5
) -> OrderProblem:
    """A forest whose room lies anywhere between its longest path and all of it."""
    while True:
        parents = [-1]
        for node in range(1, rng.randint(2, max_nodes)):
            parents.append(rng.randrange(-1 if rng.random() < 0.15 else 0, node))
        if len(set(range(len(parents))) - set(parents)) <= max_leaves:
            break
    sizes, costs = [rng.randint(1, 10) for _ in parents], [rng.randint(1, 20) for _ in parents]
    return with_room(parents, sizes, costs, rng.random(), num_passes)


def with_room(
    parents: list[int],
    sizes: list[int],
    costs: list[Any],
    share: float,
    num_passes: int = 2,
    visited: Sequence[int] = (),
) -> OrderProblem:
    """A problem whose capacity lies at this share between the longest path and all pages."""
    given = {"parents": parents, "sizes": sizes, "costs": costs, "num_passes": num_passes, "visited": visited}
    roomy = OrderProblem(capacity=1e18, **given)
    least = max(roomy.path_sizes[node] for node in roomy.visited)
    return OrderProblem(capacity=least + share * (sum(sizes) - least), **given)
