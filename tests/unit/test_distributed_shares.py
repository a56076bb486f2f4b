"""Shares of a tree: every row once, contiguous, balanced, and the duplicated tokens counted."""

import pytest
import trees

from tiercache.runtime.rows import check_rows
from tiercache.runtime.shares import duplicated_tokens, share_rows
from tiercache.runtime.tree import build_tree


def _tree(name):
    rows = check_rows(trees.make_case(name).rows, 61)
    return build_tree(rows, min_shared_tokens=1, max_node_tokens=64, max_tail_tokens=64)


@pytest.mark.parametrize("name", trees.NAMES)
@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_every_row_has_one_rank_and_leaves_stay_in_order(name, ranks):
    tree = _tree(name)
    shares = share_rows(tree, ranks)
    assert len(shares) == ranks
    assert sorted(row for share in shares for row in share) == list(range(len(tree.leaf_of_row)))
    leaves = [sorted({tree.leaf_of_row[row] for row in share}) for share in shares if share]
    assert [leaf for share in leaves for leaf in share] == sorted(set(tree.leaf_of_row))


def test_one_rank_duplicates_nothing():
    tree = _tree("depth_3")
    assert duplicated_tokens(tree, share_rows(tree, 1)) == 0


def test_two_ranks_under_one_root_duplicate_the_root():
    tree = _tree("one_level")
    root = sum(len(n.tokens) for n in tree.nodes if not n.is_leaf)
    shares = share_rows(tree, 2)
    assert all(shares)
    assert duplicated_tokens(tree, shares) == root


def test_the_largest_share_is_as_small_as_ranges_allow():
    tree = _tree("no_shared_prefix")
    tails = [len(tree.nodes[leaf].tokens) for leaf in tree.leaf_of_row]
    shares = share_rows(tree, 2)
    largest = max(sum(tails[row] for row in share) for share in shares)
    order = sorted(range(len(tails)), key=lambda row: tree.leaf_of_row[row])
    best = min(
        max(sum(tails[r] for r in order[:cut]), sum(tails[r] for r in order[cut:]))
        for cut in range(len(order))
    )
    assert largest == best
