"""Shares of a tree: which rank runs which rows.

A share is a contiguous range of leaves in depth-first order, so that the nodes that two ranks both need lie on
the one path between their ranges. The largest share is as small as contiguous ranges allow.
"""

from __future__ import annotations

from tiercache.runtime.tree import Tree

INNER_COST = 4  # token-passes of a captured token: capture, and recomputation and backward of its pop
TAIL_COST = 3


def share_rows(tree: Tree, num_ranks: int) -> list[list[int]]:
    """Row indices of each rank, ascending; some are empty when there are fewer leaves than ranks."""
    leaves = [node.index for node in tree.nodes if node.is_leaf]
    low, high = 0, sum(_costs(tree, leaves))
    while low < high:
        limit = (low + high) // 2
        if len(_cut(tree, leaves, limit)) <= num_ranks:
            high = limit
        else:
            low = limit + 1
    ranges = _cut(tree, leaves, low)
    rank_of_leaf = {leaf: rank for rank, share in enumerate(ranges) for leaf in share}
    shares: list[list[int]] = [[] for _ in range(num_ranks)]
    for row, leaf in enumerate(tree.leaf_of_row):
        shares[rank_of_leaf[leaf]].append(row)
    return shares


def duplicated_tokens(tree: Tree, shares: list[list[int]]) -> int:
    """Captured tokens that more ranks than one run, each run but the first counted."""
    total = 0
    for share in shares:
        nodes = {n for row in share for n in tree.path(tree.leaf_of_row[row])[:-1]}
        total += sum(len(tree.nodes[n].tokens) for n in nodes)
    return total - tree.num_inner_tokens


def _costs(tree: Tree, leaves: list[int]) -> list[int]:
    """Cost of each leaf, were it alone."""
    return [
        TAIL_COST * len(tree.nodes[leaf].tokens)
        + INNER_COST * sum(len(tree.nodes[n].tokens) for n in tree.path(leaf)[:-1])
        for leaf in leaves
    ]


def _cut(tree: Tree, leaves: list[int], limit: int) -> list[list[int]]:
    """The fewest ranges none of which costs more than `limit`; leaves that alone cost more stand alone."""
    ranges: list[list[int]] = []
    seen: set[int] = set()
    cost = 0
    for leaf, alone in zip(leaves, _costs(tree, leaves), strict=True):
        path = tree.path(leaf)[:-1]
        new = [n for n in path if n not in seen]
        more = TAIL_COST * len(tree.nodes[leaf].tokens)
        more += INNER_COST * sum(len(tree.nodes[n].tokens) for n in new)
        if not ranges or cost + more > limit:
            ranges.append([])
            seen, cost, new, more = set(), 0, path, alone
        ranges[-1].append(leaf)
        seen.update(new)
        cost += more
    return ranges
