"""Terms: the distinct log-probabilities that a tree must give, and where each row finds its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from tiercache.runtime.rows import TokenRow
from tiercache.runtime.tree import Tree

Indices = npt.NDArray[np.int64]


@dataclass(slots=True)
class NodeTerms:
    """The terms that one node's hidden states give.

    Attributes:
        offsets: [n] position inside the node whose last hidden state predicts the target.
        targets: [n] token predicted; the first token of a child where the offset is the node's last.
        boundary: [n] bool, True where the target belongs to a child.
    """

    offsets: Indices
    targets: Indices
    boundary: npt.NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.offsets)


@dataclass(slots=True)
class Terms:
    """Terms of all nodes, and for each row the (node, term) of each scored position in order."""

    of_node: list[NodeTerms]
    node_of: list[Indices]
    term_of: list[Indices]

    def gather(self, values: Sequence[torch.Tensor], row: int) -> torch.Tensor:
        """[S] log-probabilities of a row's scored positions, from one [n] tensor a node."""
        nodes, terms = self.node_of[row], self.term_of[row]
        parts = [values[n][torch.from_numpy(terms[nodes == n])] for n in _runs(nodes)]
        return torch.cat(parts) if parts else torch.zeros(0)

    def scatter_add(self, gradients: Sequence[torch.Tensor], row: int, grad: torch.Tensor) -> None:
        """Adds dL/dlogp [S] of a row's scored positions: a shared term gets the sum over its rows."""
        nodes, terms = self.node_of[row], self.term_of[row]
        for n in _runs(nodes):
            mine = nodes == n
            part = grad[torch.from_numpy(mine)].to(gradients[n].dtype)  # some fp64 models give fp32 logits
            gradients[n].index_add_(0, torch.from_numpy(terms[mine]), part)


def _runs(nodes: Indices) -> list[int]:
    """Distinct nodes in the order of the path; positions ascend, so equal nodes are neighbours."""
    return list(dict.fromkeys(nodes.tolist()))


def collect_terms(tree: Tree, rows: Sequence[TokenRow]) -> Terms:
    """Finds every (node, offset, target) that some row scores, once each."""
    seen: list[dict[tuple[int, int], int]] = [{} for _ in tree.nodes]
    node_of, term_of = [], []
    for row, leaf in zip(rows, tree.leaf_of_row, strict=True):
        path = tree.path(leaf)
        ends = np.array([tree.nodes[n].end for n in path])
        predicting = row.scored - 1
        places = np.searchsorted(ends, predicting, side="right")
        nodes = np.array(path, dtype=np.int64)[places] if len(places) else np.zeros(0, np.int64)
        terms = np.zeros(len(nodes), np.int64)
        for i, (n, position) in enumerate(zip(nodes.tolist(), predicting.tolist(), strict=True)):
            key = (position - tree.nodes[n].start, int(row.tokens[position + 1]))
            terms[i] = seen[n].setdefault(key, len(seen[n]))
        node_of.append(nodes)
        term_of.append(terms)
    of_node = []
    for node, found in zip(tree.nodes, seen, strict=True):
        pairs = np.array(list(found), dtype=np.int64).reshape(-1, 2)
        of_node.append(NodeTerms(pairs[:, 0], pairs[:, 1], pairs[:, 0] == len(node.tokens) - 1))
    return Terms(of_node, node_of, term_of)
