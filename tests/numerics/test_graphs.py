"""Graphs that live at once, adapters, and checkpointing inside the model: the gradient stays that of dense training."""

import dense
import model_zoo
import pytest
import torch
import trees
from plain_model import build_plain
from runs import objective_gradients, replay_gradients, replay_of

from tiercache.errors import PageMissingError
from tiercache.runtime import prefix_attention

FP64 = 1e-12
# the names that PEFT and older versions of Transformers use
pytestmark = pytest.mark.filterwarnings("ignore:`(is_)?gradient_checkpointing:FutureWarning")


def _two_batches():
    """Two batches that share a prompt, so that their pages are the same ones."""
    maker = trees._Maker(model_zoo.VOCAB, 11)
    prompt = maker.tokens(12)
    rows = [maker.row(prompt, maker.tokens(n)) for n in (5, 3, 6, 4, 7)]
    return rows[:2], rows[2:]


def _sum(logps):
    return (logps * torch.arange(1.0, 1.0 + logps.numel(), dtype=logps.dtype).view_as(logps)).sum()


def _dense_sum(model, rows):
    model.zero_grad(set_to_none=True)
    _sum(dense.logprobs(model, rows)).backward()
    return dense.gradients(model)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@pytest.mark.parametrize("activations", ["layer_inputs", "recompute", "attention", "all"])
def test_two_graphs_alive_at_once(order, activations):
    model, batches = build_plain(prefix_attention), _two_batches()
    want = [_dense_sum(model, rows) for rows in batches]
    case = trees.Case([], {"min_shared_tokens": 1, "prefix_activations": activations})
    with replay_of(model, case) as replay:
        losses = [_sum(replay.logprobs(*trees.pad(rows))) for rows in batches]
        for n in order:
            losses[n].backward()
            assert dense.relative_l2(dense.gradients(model), want[n]) < FP64


def test_a_graph_alive_while_backward_runs_a_step():
    model, (first, second) = build_plain(prefix_attention), _two_batches()
    want, want_step = _dense_sum(model, first), dense.weighted_gradients(model, second)
    with replay_of(model, trees.Case([], {"min_shared_tokens": 1})) as replay:
        loss = _sum(replay.logprobs(*trees.pad(first)))
        replay.backward(second, dense.weighted_sum)
        assert dense.relative_l2(dense.gradients(model), want_step) < FP64
        loss.backward()
        assert dense.relative_l2(dense.gradients(model), want) < FP64


def test_a_graph_that_is_dropped_takes_its_own_pages_only():
    model, (first, second) = build_plain(prefix_attention), _two_batches()
    want = _dense_sum(model, second)
    with replay_of(model, trees.Case([], {"min_shared_tokens": 1})) as replay:
        dropped = replay.logprobs(*trees.pad(first))
        kept = _sum(replay.logprobs(*trees.pad(second)))
        del dropped
        kept.backward()
        assert dense.relative_l2(dense.gradients(model), want) < FP64


def test_backward_a_second_time_says_that_the_pages_are_gone():
    model, (first, _) = build_plain(prefix_attention), _two_batches()
    with replay_of(model, trees.Case([], {"min_shared_tokens": 1})) as replay:
        loss = _sum(replay.logprobs(*trees.pad(first)))
        loss.backward(retain_graph=True)
        with pytest.raises(PageMissingError, match="second time"):
            loss.backward()


def test_without_grad_nothing_is_kept():
    model, (first, _) = build_plain(prefix_attention), _two_batches()
    with replay_of(model, trees.Case([], {"min_shared_tokens": 1})) as replay, torch.no_grad():
        logps = replay.logprobs(*trees.pad(first))
        assert not logps.requires_grad
        assert replay.store.stats().pages == 0
    assert torch.allclose(logps, dense.logprobs(model, first), rtol=1e-12, atol=1e-12)


def test_autograd_grad_and_accumulation_see_ordinary_gradients():
    model, (first, second) = build_plain(prefix_attention), _two_batches()
    want, other = _dense_sum(model, first), _dense_sum(model, second)
    with replay_of(model, trees.Case([], {"min_shared_tokens": 1})) as replay:
        wanted = list(model.parameters())
        taken = torch.autograd.grad(_sum(replay.logprobs(*trees.pad(first))), wanted)
        assert all(p.grad is None for p in wanted)
        got = dict(zip(dict(model.named_parameters()), taken, strict=True))
        assert dense.relative_l2(got, want) < FP64
        for rows in (first, second):
            _sum(replay.logprobs(*trees.pad(rows))).backward()
        both = {name: want[name] + other[name] for name in want}
        assert dense.relative_l2(dense.gradients(model), both) < FP64


def test_frozen_parameters_get_no_gradient():
    model, case = build_plain(prefix_attention), trees.make_case("depth_3")
    for parameter in model.layers[0].parameters():
        parameter.requires_grad = False
    want = dense.weighted_gradients(model, case.rows)
    got = replay_gradients(model, case)
    assert set(got) == set(want)
    assert dense.relative_l2(got, want) < FP64


@pytest.mark.parametrize("name", ["llama", "gemma2", "qwen3_moe"])
def test_lora_of_rank_4(name):
    from peft import LoraConfig, get_peft_model

    targets = ["q_proj", "k_proj", "v_proj", "o_proj"]
    config = LoraConfig(r=4, lora_alpha=8, target_modules=targets, lora_dropout=0.0)
    model = get_peft_model(model_zoo.build(name), config)
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        if parameter.requires_grad:  # B starts at zero: without this A would get no gradient
            parameter.data = torch.randn(parameter.shape, generator=generator).to(parameter) * 0.3
    case = trees.make_case("depth_3")
    want = dense.weighted_gradients(model, case.rows)
    got = replay_gradients(model, case, check_model=True)
    assert set(got) == set(want)
    assert all("lora_" in n for n in got)
    assert dense.relative_l2(got, want) < (1e-5 if name == "qwen3_moe" else 5e-6)
    _, got = objective_gradients(model, case, _sum)
    assert dense.relative_l2(got, _dense_sum(model, case.rows)) < 1e-5


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("activations", ["layer_inputs", "recompute", "attention", "all"])
@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss"])
def test_gradient_checkpointing_inside_the_model(name, activations, use_reentrant):
    model, case = model_zoo.build(name), trees.make_case("depth_3")
    want = dense.weighted_gradients(model, case.rows)
    model.enable_input_require_grads()
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    got = replay_gradients(model, case, prefix_activations=activations)
    assert dense.relative_l2(got, want) < 1e-5
    assert model.is_gradient_checkpointing
