"""Construction proves a model or refuses it, naming the layer and the reason."""

import dense
import model_zoo
import pytest
import torch
import trees
from accelerate.utils import convert_outputs_to_fp32
from plain_model import build_plain
from runs import objective_gradients, replay_gradients, replay_of
from torch import nn

from tiercache import open_store
from tiercache.errors import ModelRefusedError
from tiercache.runtime import BranchReplay, prefix_attention
from tiercache.runtime.adapters.twin import LIMIT, build_twin, named_lengths

REASONS = {
    "bloom": r"transformer\.h\.0\.self_attention \(BloomAttention\) carries tokens into each other",
    "mpt": r"MptModel.*does not run under the attention function",
    "falcon": r"transformer\.h\.0\.self_attention \(FalconAttention\) does not run under",
    "pooled": r"layers\.1\.self_attn\.indexer \(Qwen4ExpTextQSAIndexer\): sparse selection of pools",
    "zamba": r"layers\.0\.mamba: its selective scan runs head by head from zero",
    "opt": r"OPTForCausalLM does not call its base model",
    "dropout": r"model\.layers\.0\.self_attn \(LlamaAttention\) has attention_dropout in training mode; got 0\.1",
    "hidden_dropout": r"gpt_neox\.emb_dropout \(Dropout\) has dropout in training mode",
    "cross_attention": r"transformer\.h\.0\.crossattention.*cross attention",
    "shared_kv": r"model\.layers\.2\.self_attn.*shared KV",
    "chunked": r"model\.layers\.0 \(Llama4TextDecoderLayer\).*attention_chunk_size 16 instead of 64",
}


def _construct(model, **options):
    with open_store(device="16MiB") as store:
        return BranchReplay(model, store, **options)


@pytest.mark.parametrize("name", model_zoo.FAMILIES)
def test_supported_families_pass(name):
    model = model_zoo.build(name)
    before = {n: p.clone() for n, p in model.state_dict().items()}
    random_state = torch.get_rng_state()
    _construct(model)
    assert torch.equal(random_state, torch.get_rng_state())
    assert all(torch.equal(before[n], p) for n, p in model.state_dict().items())
    assert model.training
    assert model.config._attn_implementation == "eager"


def test_a_forward_that_a_trainer_wrapped_in_mixed_precision_passes():
    model = model_zoo.build("llama", dtype=torch.float32, hidden_size=64, num_hidden_layers=4)
    model.forward = convert_outputs_to_fp32(torch.autocast("cpu", torch.bfloat16)(model.forward))
    _construct(model)
    model.model.layers[1].forward = _leaking(model.model.layers[1].forward)
    with pytest.raises(ModelRefusedError, match=r"model\.layers\.1"):
        _construct(model)


def _leaking(forward):
    """A layer that lets tokens see the mean of all before them in the same call."""

    def run(hidden, *args, **kwargs):
        ones = torch.arange(1, 1 + hidden.shape[1]).view(1, -1, 1)
        return forward(hidden + 3 * hidden.cumsum(1) / ones, *args, **kwargs)

    return run


@pytest.mark.parametrize("name", REASONS)
def test_refused_with_the_layer_and_the_reason(name):
    with pytest.raises(ModelRefusedError, match=REASONS[name]):
        _construct(model_zoo.build(name))


@pytest.mark.parametrize("name", ["bloom", "chunked"])
def test_unchecked_the_gradient_would_be_silently_wrong(name):
    """What the check is for: these run, and miss by more than a tenth."""
    model, case = model_zoo.build(name), trees.make_case("depth_3")
    if name == "chunked":
        model.config.attention_chunk_size = 8
    want = dense.weighted_gradients(model, case.rows)
    assert dense.relative_l2(replay_gradients(model, case, debug=False), want) > 0.1


def test_dropout_passes_in_evaluation_mode_or_when_sharing_is_meant():
    """And the proof, which runs without it, gives the model back as it was."""
    evaluated = _construct(model_zoo.build("dropout").eval()).model
    assert not evaluated.training
    assert evaluated.model.layers[0].self_attn.attention_dropout == 0.1
    shared = _construct(model_zoo.build("hidden_dropout"), share_dropout=True).model
    assert shared.gpt_neox.emb_dropout.training
    assert shared.gpt_neox.emb_dropout.p == 0.1


def test_auxiliary_losses_are_refused():
    with pytest.raises(ModelRefusedError, match="auxiliary loss"):
        _construct(model_zoo.build("mixtral", output_router_logits=True))


def test_a_base_model_without_a_head_is_refused():
    with pytest.raises(ModelRefusedError, match="no language-model head"):
        _construct(model_zoo.build("llama").model)


class _ShiftsTokens(nn.Module):
    """A layer with a token shift beside its attention, as some recent models have."""

    def __init__(self, block):
        super().__init__()
        self.block = block

    def forward(self, x, *args):
        return self.block(x + 0.1 * x.roll(1, dims=1), *args)


def test_plain_model_that_mixes_tokens_elsewhere_is_refused():
    model = build_plain(prefix_attention)
    _construct(model)
    model.layers[1] = _ShiftsTokens(model.layers[1])
    with pytest.raises(ModelRefusedError, match=r"layers\.1 \(_ShiftsTokens\) carries tokens"):
        _construct(model)


class _ForgetsPositions(nn.Module):
    def __init__(self, block):
        super().__init__()
        self.block = block

    def forward(self, x, angle, attention):
        return self.block(x, angle - angle[:, :1], attention)


def test_plain_model_with_positions_of_its_own_is_refused():
    model = build_plain(prefix_attention)
    model.layers[2] = _ForgetsPositions(model.layers[2])
    with pytest.raises(ModelRefusedError, match=r"layers\.2 \(_ForgetsPositions\).*differ"):
        _construct(model)


def test_every_limit_on_length_lies_inside_the_proof():
    model = model_zoo.build("gpt_oss")
    assert named_lengths(model.config) == {
        "sliding_window": model_zoo.WINDOW,
        "rope_parameters.original_max_position_embeddings": 64,
    }
    assert set(named_lengths(build_twin(model).config).values()) == {LIMIT}


@pytest.mark.parametrize("name", ["longrope", "dynamic"])
def test_rotary_tables_that_follow_length_are_fixed_by_the_longest_row(name):
    """Rows beyond the length at which the tables change, nodes before it: 19 % off where each visit chooses."""
    model = model_zoo.build(name)
    maker = trees._Maker(model_zoo.VOCAB, 5)
    prompt = maker.tokens(60)
    case = trees.Case([maker.row(prompt, maker.tokens(12)) for _ in range(3)], {"min_shared_tokens": 1})
    want = dense.weighted_gradients(model, case.rows)
    got = replay_gradients(model, case, max_node_tokens=20, check_model=True)
    assert dense.relative_l2(got, want) < 5e-6


@pytest.mark.parametrize("name", ["longrope", "dynamic"])
def test_pages_of_another_longest_row_are_not_reused(name):
    model = model_zoo.build(name)
    maker = trees._Maker(model_zoo.VOCAB, 5)
    prompt = maker.tokens(30)
    short = trees.Case([maker.row(prompt, maker.tokens(8)) for _ in range(2)])
    long = trees.Case([maker.row(prompt, maker.tokens(60)) for _ in range(2)])
    with replay_of(model, trees.Case([], {"min_shared_tokens": 1})) as replay:
        alive = replay.logprobs(*trees.pad(long.rows))
        logps = replay.logprobs(*trees.pad(short.rows))
        want_long = dense.logprobs(model, long.rows).detach()
        fresh = model_zoo.build(name)  # `dynamic` keeps the frequencies of the longest call it has seen
        want_short = dense.logprobs(fresh, short.rows).detach()
        assert (alive - want_long).norm() < 1e-6 * want_long.norm()
        assert (logps - want_short).norm() < 1e-6 * want_short.norm()
        del alive, logps


def test_two_replays_of_one_model_do_not_take_each_others_visits():
    model, case = model_zoo.build("llama"), trees.make_case("one_level")
    want = dense.weighted_gradients(model, case.rows)
    with replay_of(model, case) as first:
        objective_gradients(model, case, torch.sum)
        model.zero_grad(set_to_none=True)
        first.backward(case.rows, dense.weighted_sum)
    assert dense.relative_l2(dense.gradients(model), want) < 5e-6
