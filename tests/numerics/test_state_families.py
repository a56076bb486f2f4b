"""Families with recurrent or convolution states: gradients on trees are those of dense training.

Their scans compute in fp32 whatever the weights are, so they are tested in fp32 with the limit 1e-5. Zamba2's long sums
of states and delta rules amplify rounding: dense training of theirs is up to 1.5e-5 away from itself in fp64, a replay
up to 1.8e-5, and their limit is 5e-5. That the rest is exact, on every tree and in every mode, is tested where
all of it is fp64.
"""

import functools
import math

import dense
import model_zoo
import pytest
import torch
import trees
import widened
from losses import grpo, make_batch
from runs import dense_objective, objective_gradients, replay_gradients
from transformers import DynamicCache

from tiercache import open_store
from tiercache.runtime import BranchReplay

LIMIT = {"zamba2": 5e-5, "qwen3_next": 5e-5, "qwen3_5": 5e-5, "olmo_hybrid": 5e-5}
FAMILIES = tuple(model_zoo.STATES)
ONE_OF_EACH_KIND = ("lfm2", "qwen3_next", "falcon_h1", "minimax")


@functools.cache
def _model(name):
    return model_zoo.build(name)


def _error(name, tree, **options):
    model, case = _model(name), trees.make_case(tree) if isinstance(tree, str) else tree
    want = dense.weighted_gradients(model, case.rows)
    return dense.relative_l2(replay_gradients(model, case, **options), want)


def _limit(name):
    return LIMIT.get(name, 1e-5)


@pytest.mark.parametrize("name", FAMILIES)
def test_backward(name):
    assert _error(name, "chain_of_5") < _limit(name)


def test_fp64_weights_whose_logits_are_fp32():
    model, case = model_zoo.build("mamba", dtype=torch.float64), trees.make_case("chain_of_2")
    want = dense.weighted_gradients(model, case.rows)
    assert dense.relative_l2(replay_gradients(model, case), want) < 1e-5


@pytest.mark.parametrize("tree", ["chain_of_5", "rows_of_one", "shared_scores", "row_inside_row"])
@pytest.mark.parametrize("name", ["lfm2", "falcon_h1"])
def test_trees(name, tree):
    assert _error(name, tree) < _limit(name)


@pytest.mark.parametrize("name", ["zamba2", "qwen3_next", "olmo_hybrid"])
def test_what_fp32_misses_is_no_more_than_dense_training_misses(name):
    """Against dense training of the same weights with everything in fp64, over three trees together: one is a small
    sample of rounding (measured singly: 0.9 to 3.2 times as much).
    """
    model, wide = _model(name), widened.build(name)
    wide.load_state_dict(model.state_dict())
    missed, noise = [], []
    for tree in ("chain_of_2", "depth_3", "one_level"):
        case = trees.make_case(tree)
        with widened.in_fp64():
            exact = dense.weighted_gradients(wide, case.rows)
        noise.append(dense.relative_l2(dense.weighted_gradients(model, case.rows), exact))
        missed.append(dense.relative_l2(replay_gradients(model, case), exact))
    assert math.hypot(*missed) < 3 * math.hypot(*noise), (missed, noise)


@pytest.mark.parametrize("name", FAMILIES)
def test_construction_proves_them_and_sees_their_states(name):
    with open_store(device="16MiB") as store:
        replay = BranchReplay(_model(name), store)
        assert replay.engine.page_sizes()["state_bytes"] > 0
        assert store.stats().pages == 0


def test_grpo_over_left_padded_logprobs():
    model, case = _model("lfm2"), trees.make_case("shared_scores")
    batch = make_batch(dense.logprobs(model, case.rows, "left"), trees.pad(case.rows, "left")[2])
    objective = functools.partial(grpo, batch=batch)
    logps, got = objective_gradients(model, case, objective, "left")
    want_logps, want = dense_objective(model, case.rows, objective, "left")
    assert (logps - want_logps).norm() < 1e-6 * want_logps.norm()
    assert dense.relative_l2(got, want) < 1e-6


@pytest.mark.parametrize("mode", ["detached", 7])
@pytest.mark.parametrize("name", ONE_OF_EACH_KIND[:3])
def test_constant_prefixes(name, mode):
    """Against Transformers' own cache: filled without a graph, then continued with one."""
    model, maker = _model(name), trees._Maker(model_zoo.VOCAB, 3)
    prompt = maker.tokens(13)
    case = trees.Case([maker.row(prompt, maker.tokens(n)) for n in (6, 4, 9)], {"min_shared_tokens": 1})
    got = replay_gradients(model, case, prefix_gradient=mode)
    want = _continued_gradients(model, case.rows, 13 if mode == "detached" else 13 - mode)
    assert dense.relative_l2(got, want) < _limit(name)
    exact = dense.weighted_gradients(model, case.rows)
    assert dense.relative_l2(got, exact) > 0.01


class _Continued(DynamicCache):
    """Keeps its recurrent states as they are when a forward with a graph reads them."""

    def update_recurrent_state(self, recurrent_states, layer_idx, *args, **kwargs):
        if recurrent_states.requires_grad:
            return recurrent_states
        return super().update_recurrent_state(recurrent_states, layer_idx, *args, **kwargs)


def _continued_gradients(model, rows, cut):
    """Gradients of rows whose first `cut` tokens are constants, boundary logit included."""
    model.zero_grad(set_to_none=True)
    for row in rows:
        cache, at = _Continued(config=model.config), torch.arange(len(row.tokens))[None]
        with torch.no_grad():
            before = model.base_model(input_ids=row.tokens[None, :cut], cache=cache, use_cache=True)[0]
        after = model.base_model(
            input_ids=row.tokens[None, cut:], position_ids=at[:, cut:], cache=cache, use_cache=True
        )[0]
        logits = _head(model, torch.cat([before, after], 1))[0]
        logps = torch.log_softmax(logits[:-1].float(), -1).gather(-1, row.tokens[1:, None])[:, 0]
        picked = torch.where(row.scored, torch.cat([logps.new_zeros(1), logps]), 0)
        dense.weighted_sum(picked, row).backward()
    return dense.gradients(model)


def _head(model, hidden):
    return model.lm_head(hidden) * getattr(model.model, "lm_head_multiplier", 1.0)
