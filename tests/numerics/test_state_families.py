"""Families with recurrent or convolution states: gradients on trees are those of dense training.

Their scans compute in fp32 whatever the weights are, so they are tested in fp32 with the limit 1e-5; what Zamba2's
long sums of states leave of fp32 is more, 2e-5, and its limit is 1e-4. A delta rule amplifies rounding: on one tree the
chunked and the plain form of one and the same dense training are 5e-6 apart, and a replay's other chunks were 2e-5
away: their limit is 5e-5.
So what delta rules carry from node to node is tested in fp64, with the rule written out; there it is 1e-7.
"""

import functools

import dense
import model_zoo
import pytest
import torch
import trees
from losses import grpo, make_batch
from runs import dense_objective, objective_gradients, replay_gradients
from transformers import DynamicCache

from tiercache import open_store
from tiercache.runtime import BranchReplay

LIMIT = {"zamba2": 1e-4, "qwen3_next": 5e-5, "qwen3_5": 5e-5, "olmo_hybrid": 5e-5}
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
    assert _error(name, "depth_3") < _limit(name)


def test_fp64_weights_whose_logits_are_fp32():
    model, case = model_zoo.build("mamba", dtype=torch.float64), trees.make_case("chain_of_2")
    want = dense.weighted_gradients(model, case.rows)
    assert dense.relative_l2(replay_gradients(model, case), want) < 1e-5


@pytest.mark.parametrize("tree", ["chain_of_5", "rows_of_one", "shared_scores", "row_inside_row"])
@pytest.mark.parametrize("name", ["lfm2", "falcon_h1"])
def test_trees(name, tree):
    assert _error(name, tree) < _limit(name)


@pytest.mark.long
@pytest.mark.parametrize("activations", ["layer_inputs", "recompute", "attention", "all"])
@pytest.mark.parametrize("name", FAMILIES)
def test_whole_product(name, activations):
    errors = {tree: _error(name, tree, prefix_activations=activations) for tree in trees.NAMES}
    assert all(error < _limit(name) for error in errors.values()), errors


@pytest.mark.parametrize("activations", ["recompute", "attention", "all"])
@pytest.mark.parametrize("name", [name for name in ONE_OF_EACH_KIND if name != "qwen3_next"])
def test_what_capture_leaves(name, activations):
    assert _error(name, "chain_of_2", prefix_activations=activations) < _limit(name)


def _plain_delta_rule(query, key, value, g, beta, initial_state=None, output_final_state=False, **_):
    """The gated delta rule token by token, in the dtype of its inputs: no chunks, no triangular solve, no fp32."""
    groups = value.shape[2] // key.shape[2]
    query, key = (_normalised(x.repeat_interleave(groups, 2)) for x in (query, key))
    state = value.new_zeros(*value.shape[:1], *value.shape[2:3], key.shape[-1], value.shape[-1])
    state = state if initial_state is None else initial_state
    outputs = []
    for t in range(value.shape[1]):
        state = state * g[:, t, :, None, None].exp()
        read = torch.einsum("bhkv,bhk->bhv", state, key[:, t])
        change = (value[:, t] - read) * beta[:, t, :, None]
        state = state + key[:, t, :, :, None] * change[:, :, None]
        outputs.append(torch.einsum("bhkv,bhk->bhv", state, query[:, t]) * key.shape[-1] ** -0.5)
    return torch.stack(outputs, 1), state if output_final_state else None


def _normalised(x):
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


@pytest.mark.parametrize("activations", ["layer_inputs", "recompute", "attention", "all"])
@pytest.mark.parametrize(
    "tree", ["chain_of_2", "chain_of_5", "rows_of_one", "shared_scores", "row_inside_row"]
)
def test_what_delta_rule_models_miss_in_fp32_is_rounding(monkeypatch, tree, activations):
    """With the same rule written out in fp64 the distance falls to that of models whose norms alone are fp32."""
    from transformers.models.qwen3_5 import modeling_qwen3_5

    model, case = _delta_rule_model(), trees.make_case(tree)
    monkeypatch.setattr(modeling_qwen3_5, "torch_chunk_gated_delta_rule", _plain_delta_rule)
    want = dense.weighted_gradients(model, case.rows)
    assert dense.relative_l2(replay_gradients(model, case, prefix_activations=activations), want) < 5e-7


@functools.cache
def _delta_rule_model():
    return model_zoo.build("qwen3_5", dtype=torch.float64)


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
