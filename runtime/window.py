"""Which nodes are constants under `prefix_gradient` "detached" or a window in tokens."""

from __future__ import annotations

from tiercache.runtime.tree import Node, Tree


def nearest_branch(tree: Tree) -> list[int]:
    """For each node, the smallest position at which a branch below it begins (a leaf: its own branch)."""
    nearest = [2**62] * len(tree.nodes)
    for node in reversed(tree.nodes):
        if node.is_leaf:
            nearest[node.index] = tree.branch_start[node.index]
        if node.parent >= 0:
            nearest[node.parent] = min(nearest[node.parent], nearest[node.index])
    return nearest


def split_at_window(tree: Tree, window: int, shortest_node: int = 1) -> Tree:
    """A tree whose nodes lie wholly before or wholly behind `nearest branch - window`.

    Where a part below a parent would have fewer than `shortest_node` tokens, the window is longer by as many.
    """
    nearest = nearest_branch(tree)
    nodes: list[Node] = []
    last_part: list[int] = []
    for node in tree.nodes:
        parent = last_part[node.parent] if node.parent >= 0 else -1
        cut = nearest[node.index] - window - node.start
        if len(node.tokens) - shortest_node < cut < len(node.tokens):
            cut = len(node.tokens) - shortest_node
        if parent >= 0 and cut < shortest_node:
            cut = 0
        pieces = [node.tokens[:cut], node.tokens[cut:]] if 0 < cut < len(node.tokens) else [node.tokens]
        if node.is_leaf:
            pieces = [node.tokens]
        start = node.start
        for tokens in pieces:
            new = Node(len(nodes), parent, start, tokens)
            if parent >= 0:
                nodes[parent].children.append(new.index)
            nodes.append(new)
            parent, start = new.index, start + len(tokens)
        last_part.append(parent)
    leaves = [last_part[leaf] for leaf in tree.leaf_of_row]
    return Tree(nodes, leaves, {last_part[leaf]: at for leaf, at in tree.branch_start.items()})


def constant_nodes(tree: Tree, window: int) -> frozenset[int]:
    """Captured nodes that end at or before `nearest branch - window`: no gradient enters their pages.

    A window of 0 is "detached": every shared node is a constant for its descendants. Chains that were cut
    from one row's own tokens are never constants.
    """
    nearest = nearest_branch(tree)
    return frozenset(
        node.index for node in tree.nodes if not node.is_leaf and node.end <= nearest[node.index] - window
    )
