"""What walks load when they are carried out under an eviction policy, page by page as the store would."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from typing import Literal

from tiercache.errors import PlanError
from tiercache.runtime.ordering import OrderProblem


def played_cost(
    problem: OrderProblem, walks: Sequence[Sequence[int]], policy: Literal["planned", "lru"] = "planned"
) -> float:
    """Cost of all loads of the walks, from an empty start.

    Args:
        problem: tree and capacity.
        walks: nodes in the order of their visits, one walk a pass.
        policy: who goes: "planned" knows the walks and takes the greatest size x distance / cost, "lru" does not.

    Raises:
        PlanError: the walks are not of this tree.
    """
    visits = [node for walk in walks for node in walk]
    if any(sorted(walk) != sorted(problem.visited) for walk in walks):
        raise PlanError(
            "walks: they do not visit what the tree has to visit", remedy="plan again with this tree"
        )
    paths = {node: problem.path(node) for node in problem.visited}
    uses: list[list[int]] = [[] for _ in problem.parents]
    for at, node in enumerate(visits):
        for above in paths[node]:
            uses[above].append(at)
    resident: set[int] = set()
    used_bytes = total = 0.0
    last_use = [0] * len(problem.parents)

    def badness(node: int, now: int) -> float:
        if policy == "lru":
            return -last_use[node]
        later = bisect_right(uses[node], now)
        if later == len(uses[node]):
            return math.inf
        return problem.sizes[node] * (uses[node][later] - now) / max(problem.costs[node], 1e-12)

    for now, node in enumerate(visits):
        needed = set(paths[node])
        for page in paths[node]:
            last_use[page] = now
            if page not in resident:
                total += problem.costs[page]
                used_bytes += problem.sizes[page]
        resident |= needed
        others = sorted(resident - needed, key=lambda page, now=now: badness(page, now))  # type: ignore[misc]
        while used_bytes > problem.capacity * (1 + 1e-12):
            page = others.pop()
            resident.remove(page)
            used_bytes -= problem.sizes[page]
    return total
