"""Every tree on a model that computes in fp64 throughout: the gradient is that of dense training to 1e-12."""

import functools

import dense
import pytest
import torch
import trees
from losses import OBJECTIVES, make_batch
from plain_model import build_plain
from runs import cuts_of, dense_objective, objective_gradients, replay_gradients, replay_of

from tiercache.runtime import prefix_attention

FP64 = 1e-12
FP32 = 1e-5
MODES = ["layer_inputs", "recompute", "attention", "all"]
LAYERS = [{}, {"window": 6}, {"softcap": 3.0, "scale": 0.5}]


@functools.cache
def _model(dtype=torch.float64):
    return build_plain(prefix_attention, dtype=dtype, options=LAYERS)


@functools.cache
def _dense(name, dtype=torch.float64):
    return dense.weighted_gradients(_model(dtype), trees.make_case(name).rows)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", trees.NAMES)
def test_backward_fp64(name, mode):
    got = replay_gradients(_model(), trees.make_case(name), prefix_activations=mode)
    assert dense.relative_l2(got, _dense(name)) < FP64
    assert dense.worst_parameter(got, _dense(name))[0] < 1e-11


@pytest.mark.parametrize("name", trees.NAMES)
def test_backward_fp32(name):
    got = replay_gradients(_model(torch.float32), trees.make_case(name))
    assert dense.relative_l2(got, _dense(name)) < FP32


@pytest.mark.parametrize("side", ["left", "right", "mixed"])
@pytest.mark.parametrize("name", trees.NAMES)
def test_logprobs_fp64(name, side):
    case = trees.make_case(name)
    weights = torch.rand(len(case.rows), 64, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

    def objective(logps):
        return (logps * weights[:, : logps.shape[1]]).sum()

    logps, got = objective_gradients(_model(), case, objective, side)
    want_logps, want = dense_objective(_model(), case.rows, objective, side)
    assert (logps - want_logps).abs().max() < 1e-12
    assert dense.relative_l2(got, want) < FP64


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("name", ["depth_3", "shared_scores", "duplicate_rows"])
def test_objectives_fp64(name, objective):
    case = trees.make_case(name)
    batch = make_batch(dense.logprobs(_model(), case.rows), trees.pad(case.rows)[2])

    def loss(logps):
        return OBJECTIVES[objective](logps, batch)

    _, got = objective_gradients(_model(), case, loss)
    _, want = dense_objective(_model(), case.rows, loss)
    assert dense.relative_l2(got, want) < FP64


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", trees.NAMES)
def test_detached_fp64(name, mode):
    case = trees.make_case(name)
    with replay_of(_model(), case, prefix_gradient="detached") as replay:
        want = dense.weighted_gradients(_model(), case.rows, cuts_of(replay, case.rows))
    got = replay_gradients(_model(), case, prefix_gradient="detached", prefix_activations=mode)
    assert dense.relative_l2(got, want) < FP64


@pytest.mark.parametrize("window", [1, 4, 9])
@pytest.mark.parametrize("name", trees.NAMES)
def test_window_fp64(name, window):
    case = trees.make_case(name)
    with replay_of(_model(), case, prefix_gradient=window) as replay:
        want = dense.weighted_gradients(_model(), case.rows, cuts_of(replay, case.rows))
    got = replay_gradients(_model(), case, prefix_gradient=window)
    assert dense.relative_l2(got, want) < FP64


def test_detached_is_the_response_only_closure():
    """Read off the rows alone: the prompt is a constant, the response's own tokens are not."""
    case = trees.make_case("one_level")
    want = dense.weighted_gradients(_model(), case.rows, [dense.cut_at(len(r.tokens), 13) for r in case.rows])
    got = replay_gradients(_model(), case, prefix_gradient="detached")
    assert dense.relative_l2(got, want) < FP64
    assert dense.relative_l2(got, _dense("one_level")) > 0.05


@pytest.mark.parametrize("window", [1, 5, 12])
def test_window_reaches_that_many_tokens_before_the_branches(window):
    case = trees.make_case("one_level")
    cuts = [dense.cut_at(len(r.tokens), 13 - window) for r in case.rows]
    want = dense.weighted_gradients(_model(), case.rows, cuts)
    got = replay_gradients(_model(), case, prefix_gradient=window)
    assert dense.relative_l2(got, want) < FP64


def test_window_of_the_whole_prompt_is_exact():
    got = replay_gradients(_model(), trees.make_case("one_level"), prefix_gradient=13)
    assert dense.relative_l2(got, _dense("one_level")) < FP64


@pytest.mark.parametrize("max_visit_tokens", [1, 3, 8])
def test_cutting_tails_and_batches_of_tails_changes_nothing(max_visit_tokens):
    for name in ("depth_3", "row_inside_row", "no_shared_prefix"):
        got = replay_gradients(_model(), trees.make_case(name), max_visit_tokens=max_visit_tokens)
        assert dense.relative_l2(got, _dense(name)) < FP64


def test_logits_in_small_chunks_change_nothing():
    got = replay_gradients(_model(), trees.make_case("depth_3"), head_bytes=4096)
    assert dense.relative_l2(got, _dense("depth_3")) < FP64
