"""Every family, with all that its class computes in fp32 made fp64: the gradient is that of dense training to 1e-12.

In the dtypes that classes compute in, norms, softmax, scans and experts round in fp32, and how far two orders of a sum
are apart depends on the model: this shows that nothing else is.
"""

import functools

import dense
import model_zoo
import pytest
import torch
import trees
import widened
from runs import cuts_of, replay_gradients, replay_of

LIMIT = 1e-12
WITHOUT_STATES = (*model_zoo.FAMILIES, *model_zoo.LATENTS, *model_zoo.SELECTIONS)
FAMILIES = (*WITHOUT_STATES, *model_zoo.STATES)
ACTIVATIONS = ("layer_inputs", "recompute", "attention", "all")


@functools.cache
def _model(name):
    return widened.build(name)


@functools.cache
def _dense(name, tree, mode):
    model, case, cuts = _model(name), trees.make_case(tree), None
    if mode != "exact":
        with replay_of(model, case, prefix_gradient=mode) as replay:
            cuts = cuts_of(replay, case.rows)
    return dense.weighted_gradients(model, case.rows, cuts)


def _distance(name, tree, mode="exact", activations="layer_inputs"):
    with widened.in_fp64():
        want = _dense(name, tree, mode)
        options = {"prefix_gradient": mode, "prefix_activations": activations}
        return dense.relative_l2(replay_gradients(_model(name), trees.make_case(tree), **options), want)


@pytest.mark.parametrize("name", FAMILIES)
def test_backward(name):
    assert _distance(name, "depth_3") < LIMIT
    assert torch.float32 is not torch.float64


@pytest.mark.parametrize("activations", ACTIVATIONS[1:])
@pytest.mark.parametrize("name", ["lfm2", "qwen3_5", "falcon_h1", "minimax", "glm_moe_dsa", "youtu"])
def test_what_capture_leaves(name, activations):
    assert _distance(name, "chain_of_2", "exact", activations) < LIMIT


@pytest.mark.parametrize("mode", ["detached", 7])
@pytest.mark.parametrize("name", ["youtu", "glm_moe_dsa"])
def test_constant_prefixes(name, mode):
    assert _distance(name, "one_level", mode) < LIMIT


@pytest.mark.long
@pytest.mark.parametrize("activations", ACTIVATIONS)
@pytest.mark.parametrize("name", FAMILIES)
def test_whole_product(name, activations):
    distances = {tree: _distance(name, tree, "exact", activations) for tree in trees.NAMES}
    assert all(distance < LIMIT for distance in distances.values()), distances


@pytest.mark.long
@pytest.mark.parametrize("activations", ACTIVATIONS)
@pytest.mark.parametrize("mode", ["detached", 7])
@pytest.mark.parametrize("name", WITHOUT_STATES)
def test_whole_product_of_constant_prefixes(name, mode, activations):
    distances = {tree: _distance(name, tree, mode, activations) for tree in trees.NAMES}
    assert all(distance < LIMIT for distance in distances.values()), distances
