"""The references prove themselves before anything is measured against them."""

import dense
import model_zoo
import plain_model
import pytest
import trees


def _whole(rows):
    return [dense.cut_at_nodes(len(row.tokens), [0]) for row in rows]


def test_cut_reference_without_a_cut_is_the_whole_gradient():
    model, rows = plain_model.build_plain(dense.attention), trees.make_case("depth_3").rows
    whole = dense.weighted_gradients(model, rows)
    assert dense.relative_l2(dense.weighted_gradients(model, rows, _whole(rows)), whole) < 1e-15


@pytest.mark.parametrize("name", ["gemma2", "mistral", "gpt_oss"])
def test_cut_reference_of_a_family_is_its_own_attention(name):
    model, rows = model_zoo.build(name), trees.make_case("one_level").rows
    whole = dense.weighted_gradients(model, rows)
    assert dense.relative_l2(dense.weighted_gradients(model, rows, _whole(rows)), whole) < 1e-6


def test_cuts_change_the_gradient():
    model, rows = plain_model.build_plain(dense.attention), trees.make_case("one_level").rows
    whole = dense.weighted_gradients(model, rows)
    cuts = [dense.cut_at(len(row.tokens), 10) for row in rows]
    assert dense.relative_l2(dense.weighted_gradients(model, rows, cuts), whole) > 0.05


@pytest.mark.parametrize("name", trees.NAMES)
def test_every_tree_scores_something_and_pads_on_both_sides(name):
    rows = trees.make_case(name).rows
    assert any(row.scored.any() for row in rows)
    for side in ("left", "right", "mixed"):
        ids, mask, scored = trees.pad(rows, side)
        assert ids[mask.bool()].tolist() == [t for row in rows for t in row.tokens.tolist()]
        assert scored.sum() == sum(int(row.scored.sum()) for row in rows)
