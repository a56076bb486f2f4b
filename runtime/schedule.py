"""The order of visits, and the access plan that it implies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tiercache.runtime.tree import Tree

VisitKind = Literal["capture", "score", "replay", "pop"]


@dataclass(frozen=True, slots=True)
class Visit:
    """One capture, score, replay or pop. Tails that share a parent are scored and replayed together."""

    kind: VisitKind
    nodes: tuple[int, ...]


def batch_tails(tree: Tree, leaves: list[int], max_visit_tokens: int) -> list[tuple[int, ...]]:
    """Consecutive leaves in batches of at most `max_visit_tokens` tokens; a longer leaf stands alone."""
    batches: list[tuple[int, ...]] = []
    batch: list[int] = []
    tokens = 0
    for leaf in leaves:
        size = len(tree.nodes[leaf].tokens)
        if batch and tokens + size > max_visit_tokens:
            batches.append(tuple(batch))
            batch, tokens = [], 0
        batch.append(leaf)
        tokens += size
    if batch:
        batches.append(tuple(batch))
    return batches


def plan_visits(
    tree: Tree, *, max_visit_tokens: int, passes: Literal["step", "scores", "gradients"] = "step"
) -> list[Visit]:
    """Depth-first visits; each inner node's page is loaded once for its whole subtree, which is optimal for a
    pass.

    Args:
        tree: of rows.
        max_visit_tokens: most tail tokens replayed together.
        passes: "step": capture, replay and pop in one walk, one root-to-leaf path live. "scores": capture and
            score only. "gradients": replay and pop of a tree that is captured already, walked in the opposite
            order, so that what the first walk left in the fast tiers is used first.
    """
    visits: list[Visit] = []
    captures = passes != "gradients"
    tails: VisitKind = "score" if passes == "scores" else "replay"
    backwards = passes == "gradients"
    # a stack of (node, whether its children are done), so that depth is not bounded by Python's
    stack: list[tuple[int, bool]] = []

    def enter(children: list[int]) -> None:
        leaves = [c for c in children if tree.nodes[c].is_leaf]
        inner = [c for c in children if not tree.nodes[c].is_leaf]
        batches = batch_tails(tree, leaves, max_visit_tokens)
        visits.extend(Visit(tails, batch) for batch in (reversed(batches) if backwards else batches))
        stack.extend((c, False) for c in (inner if backwards else reversed(inner)))

    enter(tree.roots)
    while stack:
        index, done = stack.pop()
        if done:
            visits.append(Visit("pop", (index,)))
            continue
        if captures:
            visits.append(Visit("capture", (index,)))
        if passes != "scores":
            stack.append((index, True))
        enter(tree.nodes[index].children)
    return visits
