"""The order of visits over a tree, and the walks of several passes over it."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from tiercache.errors import PlanError
from tiercache.runtime.ordering import OrderProblem, PlannedOrder, plan_order
from tiercache.runtime.tree import Tree

VisitKind = Literal["capture", "score", "replay", "pop"]
Pass = Literal["step", "scores", "again", "gradients"]
_ROOTS = -1


@dataclass(frozen=True, slots=True)
class Visit:
    """One capture, score, replay or pop. Tails that share a parent are scored and replayed together.

    Attributes:
        kind: what is done.
        nodes: with which.
        spent: captured nodes to whose pages nobody attends after this visit's backward.
    """

    kind: VisitKind
    nodes: tuple[int, ...]
    spent: frozenset[int] = field(default=frozenset(), compare=False)


@dataclass(frozen=True, slots=True)
class VisitOrder:
    """In which order the first walk of a tree visits what lies below each node; the next walk goes back.

    Attributes:
        below: for each inner node its inner children, and the node itself where its own tails come, if it has any;
            the same for the forest as a whole under -1.
        planned: how the order was found; None for a tree's own order.
    """

    below: dict[int, list[int]]
    planned: PlannedOrder | None = None


def own_order(tree: Tree) -> VisitOrder:
    """The order in which the tree has its nodes, tails first."""
    below = {
        _ROOTS: [*_tails_of(tree, _ROOTS), *(root for root in tree.roots if not tree.nodes[root].is_leaf)]
    }
    for node in tree.nodes:
        if not node.is_leaf:
            inner = (c for c in node.children if not tree.nodes[c].is_leaf)
            below[node.index] = [*_tails_of(tree, node.index), *inner]
    return VisitOrder(below)


def _tails_of(tree: Tree, index: int) -> list[int]:
    """The node itself when tails hang on it."""
    return [index] if _leaves(tree, index) else []


def _leaves(tree: Tree, index: int) -> list[int]:
    children = tree.roots if index == _ROOTS else tree.nodes[index].children
    return [c for c in children if tree.nodes[c].is_leaf]


def best_order(
    tree: Tree, page_bytes: Sequence[int], capacity_bytes: int, num_passes: int, *, time_limit_s: float = 0.05
) -> VisitOrder:
    """The order of children with which `num_passes` walks back and forth load the least.

    Args:
        tree: one prompt's, or several groups'.
        page_bytes: of each node's pages, 0 for leaves.
        capacity_bytes: of the tier that should hold pages from one walk to the next.
        num_passes: walks over pages that stay the same.
        time_limit_s: of the search.

    Raises:
        PlanError: the capacity is below the pages of one path.
    """
    inner = [node for node in tree.nodes if not node.is_leaf]
    if not inner:
        return own_order(tree)
    rank = {node.index: k for k, node in enumerate(inner)}
    problem = OrderProblem(
        parents=[rank.get(node.parent, -1) for node in inner],
        sizes=[page_bytes[node.index] for node in inner],
        costs=[page_bytes[node.index] for node in inner],
        capacity=capacity_bytes,
        num_passes=num_passes,
        visited=[rank[n.index] for n in inner if _leaves(tree, n.index)],
    )
    planned = plan_order(problem, time_limit_s)
    below = {_ROOTS: [*_tails_of(tree, _ROOTS), *(inner[k].index for k in planned.roots)]}
    for k, node in enumerate(inner):
        below[node.index] = [inner[c].index for c in planned.children[k]]
    return VisitOrder(below, planned)


def batch_tails(tree: Tree, leaves: list[int], max_visit_tokens: int) -> list[tuple[int, ...]]:
    """Leaves packed into as few batches of at most `max_visit_tokens` tokens as best fit finds, the longest first.

    A longer leaf stands alone. Batches and the leaves in them are in the tree's order; leaves of one length stay
    together as they come.
    """
    batches: list[list[int]] = []
    left: list[tuple[int, int]] = []  # room that a batch has left, and the batch
    for leaf in sorted(leaves, key=lambda leaf: -len(tree.nodes[leaf].tokens)):
        size = len(tree.nodes[leaf].tokens)
        at = bisect_left(left, (size, -1))
        if at < len(left):
            room, batch = left.pop(at)
            batches[batch].append(leaf)
            insort(left, (room - size, batch))
        else:
            insort(left, (max_visit_tokens - size, len(batches)))
            batches.append([leaf])
    return sorted(tuple(sorted(batch)) for batch in batches)


def plan_visits(
    tree: Tree,
    *,
    max_visit_tokens: int,
    passes: Pass = "step",
    order: VisitOrder | None = None,
    backwards: bool | None = None,
) -> list[Visit]:
    """Depth-first visits; each inner node's page is loaded once for its whole subtree, which is optimal for a
    pass.

    Args:
        tree: of rows.
        max_visit_tokens: most tail tokens replayed together.
        passes: "step": capture, replay and pop in one walk, one root-to-leaf path live. "scores": capture and
            score only. "again": score a tree that is captured already. "gradients": replay and pop such a tree.
        order: of what lies below each node; the tree's own by default.
        backwards: walk in the opposite order, so that what the walk before left in the fast tiers is used first.
            "gradients" does so by default.

    Raises:
        PlanError: the order is another tree's.
    """
    order = own_order(tree) if order is None else order
    check_order(order, tree)
    backwards = passes == "gradients" if backwards is None else backwards
    captures, pops = passes in ("step", "scores"), passes in ("step", "gradients")
    tails: VisitKind = "replay" if pops else "score"
    visits: list[Visit] = []
    # a stack of (node, what is done there), so that depth is not bounded by Python's
    stack: list[tuple[int, Literal["enter", "tails", "leave"]]] = []

    def enter(index: int) -> None:
        below = order.below[index]
        stack.extend(
            (child, "tails" if child == index else "enter")
            for child in (below if backwards else reversed(below))
        )

    enter(_ROOTS)
    while stack:
        index, what = stack.pop()
        if what == "leave":
            visits.append(Visit("pop", (index,)))
        elif what == "tails":
            batches = batch_tails(tree, _leaves(tree, index), max_visit_tokens)
            visits.extend(Visit(tails, batch) for batch in (reversed(batches) if backwards else batches))
        else:
            if captures:
                visits.append(Visit("capture", (index,)))
            if pops:
                stack.append((index, "leave"))
            enter(index)
    return _with_spent(tree, visits) if pops else visits


def _with_spent(tree: Tree, visits: list[Visit]) -> list[Visit]:
    """The same visits, each with the ancestors for which it is the last one below."""
    seen: set[int] = set()
    marked: list[Visit] = []
    for visit in reversed(visits):
        ancestors = frozenset(tree.path(visit.nodes[0])[:-1])
        marked.append(replace(visit, spent=ancestors - seen) if visit.kind in ("replay", "pop") else visit)
        seen |= ancestors
    return marked[::-1]


def plan_passes(
    tree: Tree, passes: Sequence[Pass], *, max_visit_tokens: int, order: VisitOrder | None = None
) -> list[list[Visit]]:
    """Several walks over one tree whose pages stay: each goes back where the one before it came from.

    Args:
        tree: of rows.
        passes: as in `plan_visits`; "scores" or "step" first and nowhere else, "gradients" last if at all.
        max_visit_tokens: most tail tokens replayed together.
        order: as in `plan_visits`.

    Raises:
        PlanError: passes that read pages before they are written or after they are dropped.
    """
    for k, name in enumerate(passes):
        if (name in ("scores", "step")) != (k == 0) or (
            name in ("gradients", "step") and k < len(passes) - 1
        ):
            raise PlanError(
                "passes: pages must be captured first, once, and popped last",
                got=", ".join(passes),
                limit='"step", or "scores", then "again" any number of times, then "gradients" or nothing',
            )
    return [
        plan_visits(tree, max_visit_tokens=max_visit_tokens, passes=name, order=order, backwards=k % 2 == 1)
        for k, name in enumerate(passes)
    ]


def check_order(order: VisitOrder, tree: Tree) -> None:
    """Raises PlanError unless the order is of this tree."""
    mine = own_order(tree).below
    differing = [
        n
        for n in mine.keys() | order.below.keys()
        if sorted(mine.get(n, ())) != sorted(order.below.get(n, ()))
    ]
    if differing:
        raise PlanError(
            "order: it was planned for another tree",
            got=f"nodes {sorted(differing)[:5]} have other children",
            remedy="plan again with the tree of this step",
        )
