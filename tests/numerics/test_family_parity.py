"""Every supported Transformers family: gradients on trees are those of dense training.

Transformers keeps norms, rotary tables and eager softmax in fp32 whatever the weights are, so an fp64 model
has a floor: a sum in another order differs by up to 1.6e-6 relative, and the limit is 5e-6. Families with
experts are tested in fp32, in which their experts compute. That the rest is exact, on every tree and in every mode,
is tested where all of it is fp64.
"""

import functools

import dense
import model_zoo
import pytest
import torch
import trees
from losses import grpo, make_batch
from runs import cuts_of, objective_gradients, replay_gradients, replay_of

LIMIT = {torch.float64: 5e-6, torch.float32: 1e-5}
FAMILIES = tuple(model_zoo.FAMILIES)
# of attention (windows, soft caps, sinks, latents), of heads (scaled, capped, tied) and of experts
ONE_OF_EACH_KIND = ("llama", "mistral", "gemma2", "granite", "cohere", "gpt_oss", "qwen3_moe", "deepseek_v3")


@functools.cache
def _model(name):
    return model_zoo.build(name)


@functools.cache
def _dense(name, tree):
    return dense.weighted_gradients(_model(name), trees.make_case(tree).rows)


def _limit(name):
    return LIMIT[model_zoo.FAMILIES[name].dtype]


@pytest.mark.parametrize("name", FAMILIES)
def test_backward(name):
    got = replay_gradients(_model(name), trees.make_case("chain_of_5"))
    assert dense.relative_l2(got, _dense(name, "chain_of_5")) < _limit(name)


@pytest.mark.parametrize("activations", ["attention", "all"])
@pytest.mark.parametrize("name", ONE_OF_EACH_KIND)
def test_what_capture_may_leave(name, activations):
    got = replay_gradients(_model(name), trees.make_case("chain_of_5"), prefix_activations=activations)
    assert dense.relative_l2(got, _dense(name, "chain_of_5")) < _limit(name)


@pytest.mark.parametrize("name", ONE_OF_EACH_KIND)
def test_grpo_over_left_padded_logprobs(name):
    model, case = _model(name), trees.make_case("shared_scores")
    model.zero_grad(set_to_none=True)
    want_logps = dense.logprobs(model, case.rows, "left")
    objective = functools.partial(grpo, batch=make_batch(want_logps, trees.pad(case.rows, "left")[2]))
    objective(want_logps).backward()
    want = dense.gradients(model)
    logps, got = objective_gradients(model, case, objective, "left")
    assert (logps - want_logps).norm() < _limit(name) * want_logps.norm()
    assert dense.relative_l2(got, want) < _limit(name)


@pytest.mark.parametrize("name", ["gemma2", "gpt_oss", "deepseek_v3"])
def test_detached(name):
    model, case = _model(name), trees.make_case("one_level")
    with replay_of(model, case, prefix_gradient="detached") as replay:
        cuts = cuts_of(replay, case.rows)
    want = dense.weighted_gradients(model, case.rows, cuts)
    assert dense.relative_l2(replay_gradients(model, case, prefix_gradient="detached"), want) < _limit(name)


@pytest.mark.parametrize("name", ["llama", "mistral", "gpt_neox"])
def test_fp32(name):
    model, case = model_zoo.build(name, dtype=torch.float32), trees.make_case("depth_3")
    want = dense.weighted_gradients(model, case.rows)
    assert dense.relative_l2(replay_gradients(model, case), want) < 1e-5
