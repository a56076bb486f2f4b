"""Rows -> tree of nodes: equal leading tokens are run once, where that pays."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from tiercache.runtime.rows import TokenRow

Tokens = npt.NDArray[np.int64]


@dataclass(slots=True)
class Node:
    """A run of tokens that all rows below it share, or the tail of a leaf.

    Attributes:
        index: place in `Tree.nodes`; parents come before their children.
        parent: index of the parent, -1 at a root.
        start: position of its first token in every row below it.
        tokens: [n] int64.
        children: indices, in order.
    """

    index: int
    parent: int
    start: int
    tokens: Tokens
    children: list[int] = field(default_factory=list)

    @property
    def end(self) -> int:
        """Position after its last token."""
        return self.start + len(self.tokens)

    @property
    def is_leaf(self) -> bool:
        """Whether it is replayed, not captured."""
        return not self.children


@dataclass(slots=True)
class Tree:
    """Nodes in depth-first order and, for every row, the leaf whose path carries the row's tokens.

    Attributes:
        nodes: parents before children.
        leaf_of_row: index of the leaf of each row.
        branch_start: for each leaf, the position from which its tokens are no other row's: its own start, or
            that of the chain it was cut from.
    """

    nodes: list[Node]
    leaf_of_row: list[int]
    branch_start: dict[int, int]

    def path(self, index: int) -> list[int]:
        """Node indices from the root down to `index`, inclusive."""
        path = []
        while index >= 0:
            path.append(index)
            index = self.nodes[index].parent
        return path[::-1]

    @property
    def roots(self) -> list[int]:
        """Nodes without a parent, in order."""
        return [node.index for node in self.nodes if node.parent < 0]

    @property
    def longest_row(self) -> int:
        """Tokens of the longest path."""
        return max(node.end for node in self.nodes)

    @property
    def num_inner_tokens(self) -> int:
        """Tokens of captured nodes."""
        return sum(len(node.tokens) for node in self.nodes if not node.is_leaf)

    @property
    def num_tail_tokens(self) -> int:
        """Tokens of leaves."""
        return sum(len(node.tokens) for node in self.nodes if node.is_leaf)


def build_tree(
    rows: Sequence[TokenRow],
    *,
    min_shared_tokens: int,
    max_node_tokens: int,
    max_tail_tokens: int,
    shortest_node: int = 1,
) -> Tree:
    """Merges rows on equal leading tokens.

    A run of L tokens shared by g branches becomes a node when what it saves, L * (3g - 4) token-passes, is at
    least what two branches save on `min_shared_tokens`; otherwise each branch keeps its own copy, which is
    just as exact. Runs longer than `max_node_tokens` become a chain of nodes of nearly equal length; a tail
    longer than `max_tail_tokens` keeps its last `max_tail_tokens` and gives the rest to a chain. Nodes below a
    parent have at least `shortest_node` tokens, whatever the other limits say; a shorter run is not shared.
    """
    order, carrier = _carriers(rows)
    shared = _adjacent_shared(rows, order)
    builder = _Builder(
        rows, order, shared, min_shared_tokens, max_node_tokens, max_tail_tokens, shortest_node
    )
    leaf_of_carrier = builder.build()
    leaves = [leaf_of_carrier[carrier[n]] for n in range(len(rows))]
    return Tree(builder.nodes, leaves, builder.branch_start)


def _carriers(rows: Sequence[TokenRow]) -> tuple[list[int], list[int]]:
    """Sorted rows that are no prefix of another, and for each row the one that carries its tokens.

    In lexicographic order a row that is a prefix of any other is a prefix of the next one.
    """
    keys = [row.tokens.astype(">i8").tobytes() for row in rows]
    by_key = sorted(range(len(rows)), key=lambda n: keys[n])
    carrier = [0] * len(rows)
    order: list[int] = []
    following = -1
    for n in reversed(by_key):
        if following < 0 or not keys[following].startswith(keys[n]):
            following = n
            order.append(n)
        carrier[n] = following
    return order[::-1], carrier


def _adjacent_shared(rows: Sequence[TokenRow], order: list[int]) -> list[int]:
    shared = []
    for left, right in itertools.pairwise(order):
        a, b = rows[left].tokens, rows[right].tokens
        n = min(len(a), len(b))
        differ = np.flatnonzero(a[:n] != b[:n])
        shared.append(int(differ[0]) if differ.size else n)
    return shared


def _even_cuts(length: int, most: int, least: int) -> list[int]:
    """Ends of the fewest pieces of at most `most`, as equal as can be, but of at least `least`."""
    count = max(1, min(-(-length // most), length // least))
    return [length * (i + 1) // count for i in range(count)]


class _Builder:
    def __init__(
        self,
        rows: Sequence[TokenRow],
        order: list[int],
        shared: list[int],
        min_shared_tokens: int,
        max_node_tokens: int,
        max_tail_tokens: int,
        shortest_node: int,
    ) -> None:
        self.shortest = shortest_node
        self.rows, self.order, self.shared = rows, order, shared
        self.min_shared = min_shared_tokens
        self.max_node, self.max_tail = max_node_tokens, max_tail_tokens
        self.nodes: list[Node] = []
        self.leaf_of: dict[int, int] = {}
        self.branch_start: dict[int, int] = {}

    def build(self) -> dict[int, int]:
        # (first, last + 1) of `order`, the tokens that its ancestors already hold, the parent node
        pending = [(0, len(self.order), 0, -1)]
        while pending:
            first, end, done, parent = pending.pop()
            if end - first == 1:
                self._add_leaf(self.order[first], done, parent)
                continue
            common = min(self.shared[first : end - 1])
            groups = self._groups(first, end, common)
            length = common - done
            long_enough = length >= (self.shortest if parent >= 0 else 1)
            if long_enough and length * (3 * len(groups) - 4) >= 2 * self.min_shared:
                tokens = self.rows[self.order[first]].tokens[done:common]
                parent = self._add_chain(tokens, done, parent)
                done = common
            pending.extend((a, b, done, parent) for a, b in reversed(groups))
        return self.leaf_of

    def _groups(self, first: int, end: int, common: int) -> list[tuple[int, int]]:
        cuts = [first, *(i + 1 for i in range(first, end - 1) if self.shared[i] == common), end]
        return list(itertools.pairwise(cuts))

    def _add_leaf(self, row: int, done: int, parent: int) -> None:
        branch_start = done
        tokens = self.rows[row].tokens[done:]
        inner = len(tokens) - self.max_tail
        if inner >= (self.shortest if parent >= 0 else 1):
            parent = self._add_chain(tokens[:inner], done, parent)
            tokens, done = tokens[inner:], done + inner
        leaf = self._add(tokens, done, parent)
        self.leaf_of[row] = leaf
        self.branch_start[leaf] = branch_start

    def _add_chain(self, tokens: Tokens, start: int, parent: int) -> int:
        begin = 0
        for end in _even_cuts(len(tokens), self.max_node, self.shortest):
            parent = self._add(tokens[begin:end], start + begin, parent)
            begin = end
        return parent

    def _add(self, tokens: Tokens, start: int, parent: int) -> int:
        node = Node(len(self.nodes), parent, start, tokens)
        self.nodes.append(node)
        if parent >= 0:
            self.nodes[parent].children.append(node.index)
        return node.index
