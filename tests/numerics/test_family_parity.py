"""Every supported Transformers family: gradients on trees are those of dense training.

Transformers keeps norms, rotary tables and eager softmax in fp32 whatever the weights are, so an fp64 model
has a floor: a sum in another order differs by up to 1.6e-6 relative, and the limit is 5e-6. Families with
experts are tested in fp32, in which their experts compute.
"""

import functools

import dense
import model_zoo
import pytest
import torch
import trees
from losses import grpo, make_batch
from runs import cuts_of, dense_objective, objective_gradients, replay_gradients, replay_of

LIMIT = {torch.float64: 5e-6, torch.float32: 1e-5}
FAMILIES = tuple(model_zoo.FAMILIES)
TREES = ("depth_3", "chain_of_5")
MODES = ("exact", "detached", 7)


@functools.cache
def _model(name):
    return model_zoo.build(name)


def _limit(name):
    return LIMIT[model_zoo.FAMILIES[name].dtype]


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("name", FAMILIES)
def test_backward(name, tree):
    model, case = _model(name), trees.make_case(tree)
    want = dense.weighted_gradients(model, case.rows)
    assert dense.relative_l2(replay_gradients(model, case), want) < _limit(name)


@pytest.mark.parametrize("activations", ["attention", "all"])
@pytest.mark.parametrize("name", FAMILIES)
def test_what_capture_may_leave(name, activations):
    assert _distance(name, "depth_3", "exact", activations) < _limit(name)


@pytest.mark.parametrize("name", FAMILIES)
def test_grpo_over_left_padded_logprobs(name):
    model, case = _model(name), trees.make_case("shared_scores")
    batch = make_batch(dense.logprobs(model, case.rows, "left"), trees.pad(case.rows, "left")[2])
    objective = functools.partial(grpo, batch=batch)
    logps, got = objective_gradients(model, case, objective, "left")
    want_logps, want = dense_objective(model, case.rows, objective, "left")
    assert (logps - want_logps).norm() < _limit(name) * want_logps.norm()
    assert dense.relative_l2(got, want) < _limit(name)


@pytest.mark.parametrize("name", ["gemma2", "gpt_oss", "deepseek_v3"])
def test_detached(name):
    assert _distance(name, "one_level", "detached", "layer_inputs") < _limit(name)


@pytest.mark.parametrize("name", ["llama", "mistral", "gpt_neox"])
def test_fp32(name):
    model, case = model_zoo.build(name, dtype=torch.float32), trees.make_case("depth_3")
    want = dense.weighted_gradients(model, case.rows)
    assert dense.relative_l2(replay_gradients(model, case), want) < 1e-5


@pytest.mark.long
@pytest.mark.parametrize("activations", ["layer_inputs", "recompute", "attention", "all"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", FAMILIES)
def test_whole_product(name, mode, activations):
    distances = {tree: _distance(name, tree, mode, activations) for tree in trees.NAMES}
    assert all(distance < _limit(name) for distance in distances.values()), distances


def _distance(name, tree, mode, activations):
    model, case = _model(name), trees.make_case(tree)
    options = {"prefix_gradient": mode, "prefix_activations": activations}
    cuts = None
    if mode != "exact":
        with replay_of(model, case, **options) as replay:
            cuts = cuts_of(replay, case.rows)
    want = dense.weighted_gradients(model, case.rows, cuts)
    return dense.relative_l2(replay_gradients(model, case, **options), want)
