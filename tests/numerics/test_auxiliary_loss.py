"""The experts' load-balancing loss on trees: that of Transformers on the padded batch, and its gradient; in fp64."""

import functools

import dense
import model_zoo
import pytest
import torch
import trees
import widened
from runs import replay_of

from tiercache import open_store
from tiercache.errors import ConfigError, ModelRefusedError
from tiercache.runtime import BranchReplay

FAMILIES = ("mixtral", "qwen3_moe", "gpt_oss", "qwen3_next", "jamba")
SCALE = 0.7
LIMIT = 1e-12
ON = {"auxiliary_loss": True}


@pytest.fixture(autouse=True)
def _in_fp64():
    with widened.in_fp64():
        yield


@functools.cache
def _model(name):
    return widened.build(name, output_router_logits=True, router_aux_loss_coef=0.5)


def _dense(model, case, scale, side="right"):
    """Value, expert counts of each layer and gradients of the weighted sum plus `scale` times the loss."""
    model.zero_grad(set_to_none=True)
    ids, mask, _ = trees.pad(case.rows, side)
    output = model(input_ids=ids, attention_mask=mask, use_cache=False)
    for row in case.rows:
        if row.scored.any():
            picked = dense.row_logprobs(model, row.tokens)
            dense.weighted_sum(torch.where(row.scored, picked, 0), row).backward()
    (scale * output.aux_loss).backward()
    counts = torch.zeros(output.router_logits[0].shape[-1])
    for logits in output.router_logits:
        chosen = torch.topk(torch.softmax(logits, -1), model.num_experts_per_tok, -1).indices
        counts.index_add_(0, chosen.reshape(-1), mask.reshape(-1).float().repeat_interleave(chosen.shape[-1]))
    return output.aux_loss.detach(), counts, dense.gradients(model)


@pytest.mark.parametrize("tree", ["depth_3", "row_inside_row"])
@pytest.mark.parametrize("name", FAMILIES)
def test_gradient_and_counts_are_those_of_the_batch(name, tree):
    model, case = _model(name), trees.make_case(tree)
    value, counts, want = _dense(model, case, 0.5)
    steps = []
    with replay_of(model, case, **ON) as replay:
        make_step = replay.engine.make_step
        replay.engine.make_step = lambda *a, **k: steps.append(make_step(*a, **k)) or steps[-1]
        report = replay.backward(case.rows, dense.weighted_sum)
    got = dense.gradients(model)
    assert torch.equal(steps[0].balance.counts, counts)
    assert dense.relative_l2(got, want) < LIMIT
    router = next(n for n in want if n.endswith(("gate.weight", "router.weight")))
    assert (got[router] - want[router]).norm() < LIMIT * want[router].norm()
    assert abs(report.loss - (_sum_of_losses(model, case) + 0.5 * float(value))) < LIMIT * abs(report.loss)


def _sum_of_losses(model, case):
    with torch.no_grad():
        picked = [dense.row_logprobs(model, row.tokens) for row in case.rows]
        return sum(
            float(dense.weighted_sum(torch.where(r.scored, p, 0), r))
            for r, p in zip(case.rows, picked, strict=True)
        )


@pytest.mark.parametrize("activations", ["layer_inputs", "recompute", "attention", "all"])
def test_logprobs_give_it_beside_the_log_probabilities(activations):
    model, case = _model("mixtral"), trees.make_case("shared_scores")
    value, _, want = _dense(model, case, SCALE)
    model.zero_grad(set_to_none=True)
    with replay_of(model, case, prefix_activations=activations, **ON) as replay:
        logps = replay.logprobs(*trees.pad(case.rows))
        loss = SCALE * replay.auxiliary_loss
        for line, row in zip(logps, case.rows, strict=True):
            loss = loss + dense.weighted_sum(line[: len(row.tokens)], row)
        torch.testing.assert_close(replay.auxiliary_loss.detach(), value, rtol=1e-12, atol=0)
        loss.backward()
    assert dense.relative_l2(dense.gradients(model), want) < LIMIT


def test_shared_tokens_count_once_for_every_row():
    """Counted once in all, the shares of the prompt's experts would be others, and the gradient with them."""
    model, case = _model("mixtral"), trees.make_case("one_level")
    _, counts, want = _dense(model, case, 0.5)
    with replay_of(model, case, **ON) as replay:
        make_step, steps = replay.engine.make_step, []

        def once(*args, **kwargs):
            steps.append(make_step(*args, **kwargs))
            steps[0].balance.weights = [w.clamp(max=1) for w in steps[0].balance.weights]
            return steps[0]

        replay.engine.make_step = once
        replay.backward(case.rows, dense.weighted_sum)
    assert not torch.equal(steps[0].balance.counts, counts)
    assert dense.relative_l2(dense.gradients(model), want) > 1e-4


def test_it_is_wanted_by_name_or_refused():
    with open_store(device="16MiB") as store:
        with pytest.raises(ModelRefusedError, match="auxiliary loss"):
            BranchReplay(_model("mixtral"), store)
        with pytest.raises(ConfigError, match="no load-balancing loss"):
            BranchReplay(model_zoo.build("deepseek_v3"), store, **ON)
        with pytest.raises(ConfigError, match="auxiliary_loss with a prefix"):
            BranchReplay(_model("mixtral"), store, prefix_gradient="detached", **ON)
        BranchReplay(_model("mixtral"), store, **ON)
