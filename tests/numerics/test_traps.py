"""The traps of exact gradients on a prefix tree, each with its name.

Where a mistake is easily made again, the test makes it on purpose and sees the gradient go wrong by per
cents: such a test cannot pass on broken code.
"""

import functools

import dense
import model_zoo
import pytest
import torch
import trees
from plain_model import build_plain
from runs import objective_gradients, replay_gradients, replay_of
from torch import nn

from tiercache import open_store
from tiercache.errors import ModelRefusedError, ParameterChangedError
from tiercache.runtime import BranchReplay, prefix_attention
from tiercache.runtime.engine import Engine
from tiercache.runtime.params import ParameterSums
from tiercache.runtime.terms import Terms
from tiercache.runtime.visits import VisitRunner

FP64 = 1e-12


@functools.cache
def _model():
    return build_plain(prefix_attention)


def _error(case, **options):
    want = dense.weighted_gradients(_model(), case.rows)
    return dense.relative_l2(replay_gradients(_model(), case, **options), want)


def test_boundary_logit(monkeypatch):
    case = trees.make_case("depth_3")
    assert _error(case) < FP64
    gradients = VisitRunner._gradients

    def without_boundary(self, step, frame):
        kept = torch.cat([torch.from_numpy(~step.terms.of_node[p.node].boundary) for p in frame.pieces])
        return gradients(self, step, frame) * kept

    monkeypatch.setattr(VisitRunner, "_gradients", without_boundary)
    assert _error(case) > 0.1


@pytest.mark.parametrize("name", ["duplicate_rows", "row_inside_row", "shared_scores"])
def test_shared_losses_are_summed_over_rows(name, monkeypatch):
    case = trees.make_case(name)
    assert _error(case) < FP64

    def take_once(self, gradients, row, grad):
        for node, term, value in zip(self.node_of[row], self.term_of[row], grad, strict=True):
            gradients[node][term] = value

    monkeypatch.setattr(Terms, "scatter_add", take_once)
    assert _error(case) > 0.05


def test_positions_continue_along_the_path():
    case = trees.make_case("depth_3")
    assert _error(case) < FP64
    hidden = type(_model()).hidden

    def restarted(self, input_ids, position_ids):
        return hidden(self, input_ids, position_ids - position_ids.min())

    class Broken(type(_model())):
        hidden = restarted

    broken = build_plain(prefix_attention)
    broken.__class__ = Broken
    want = dense.weighted_gradients(_model(), case.rows)
    assert dense.relative_l2(replay_gradients(broken, case), want) > 0.1


def test_the_root_is_not_detached(monkeypatch):
    case = trees.make_case("depth_3")
    assert _error(case) < FP64
    make_step = Engine.make_step

    def detached_root(self, rows, **options):
        step = make_step(self, rows, **options)
        step.constants = frozenset(step.tree.roots)
        return step

    monkeypatch.setattr(Engine, "make_step", detached_root)
    assert _error(case) > 0.1


def test_denominators_are_those_of_the_whole_batch():
    """A token mean over the batch, sent through in two calls: each call must not divide by its own tokens."""
    case = trees.make_case("depth_3")
    total = sum(int(row.scored.sum()) for row in case.rows)

    def token_mean(logps, row):
        return -(row.advantage * logps).sum() / total

    model = _model()
    model.zero_grad(set_to_none=True)
    for row in case.rows:
        token_mean(torch.where(row.scored, dense.row_logprobs(model, row.tokens), 0), row).backward()
    want = dense.gradients(model)
    with replay_of(model, case) as replay:
        for rows in (case.rows[:3], case.rows[3:]):
            replay.backward(rows, token_mean)
    assert dense.relative_l2(dense.gradients(model), want) < FP64


def test_gradient_pages_add_in_fp32():
    model, case = build_plain(prefix_attention, dtype=torch.bfloat16), trees.make_case("depth_3")
    with replay_of(model, case) as replay:
        accumulate, dtypes = replay.store.accumulate, set()
        replay.store.accumulate = lambda key, tensor: (dtypes.add(tensor.dtype), accumulate(key, tensor))[1]
        take, sums = replay.store.take, set()

        def watched(key):
            page = take(key)
            if page is not None and key.kind.startswith("grad_"):
                sums.add(page.dtype)
            return page

        replay.store.take = watched
        replay.backward(case.rows, dense.weighted_sum)
    assert sums == {torch.float32}


def test_parameter_gradients_add_in_fp32_and_round_once():
    """A large first term and many small ones: a bf16 sum would stay at the first."""
    layer = nn.Linear(1, 1, bias=False).to(torch.bfloat16)
    for in_fp32, want in ((True, 2.0), (False, 1.0)):
        sums = ParameterSums(layer, sum_in_fp32=in_fp32)
        with sums.installed():
            layer(torch.ones(1, 1, dtype=torch.bfloat16)).backward()
            for _ in range(1024):
                layer(torch.full((1, 1), 2.0**-10, dtype=torch.bfloat16)).backward()
        (total,) = sums.take()
        assert total.dtype == torch.bfloat16
        assert total.item() == want


def test_bf16_error_does_not_grow_with_the_number_of_nodes():
    model, case = build_plain(prefix_attention, dtype=torch.bfloat16), trees.make_case("chain_of_1")
    exact = build_plain(prefix_attention)
    exact.load_state_dict(model.state_dict())
    want = dense.weighted_gradients(exact, case.rows)
    few = dense.relative_l2(replay_gradients(model, case, max_node_tokens=10), want)
    many = dense.relative_l2(replay_gradients(model, case, max_node_tokens=1), want)
    assert many < 1.25 * few


def test_mixture_of_experts_routes_alike_at_capture_and_pop():
    for name in ("mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss"):
        model, case = model_zoo.build(name), trees.make_case("depth_3")
        pages = [replay_gradients(model, case, prefix_activations=a) for a in ("layer_inputs", "recompute")]
        assert dense.relative_l2(*pages) < 1e-6


@pytest.mark.parametrize("activations", ["layer_inputs", "recompute"])
@pytest.mark.parametrize("name", ["mixtral", "deepseek_v3"])
def test_mixture_of_experts_that_routes_otherwise_at_pop_is_an_error(name, activations):
    """The last layer's router: no page depends on it, so only its choices give it away."""
    model, case = model_zoo.build(name), trees.make_case("one_level")
    router = model.model.layers[-1].mlp.gate

    def rerouting(logps, row):
        router.weight.data.neg_()  # behind autograd's version counter
        return dense.weighted_sum(logps, row)

    with (
        replay_of(model, case, prefix_activations=activations) as replay,
        pytest.raises(ParameterChangedError, match=r"layers\.1\.mlp.*experts"),
    ):
        replay.backward(case.rows[:3], rerouting)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", ["empty_completions", "rows_of_one", "all_equal", "no_shared_prefix"])
def test_padding_and_rows_at_the_limits(name, side):
    case = trees.make_case(name)
    _, got = objective_gradients(_model(), case, lambda logps: logps.sum(), side)
    _model().zero_grad(set_to_none=True)
    dense.logprobs(_model(), case.rows).sum().backward()
    assert dense.relative_l2(got, dense.gradients(_model())) < FP64


def test_tied_and_repeated_parameters_are_finalised_once():
    """Hooks on a parameter see one gradient a step, however many visits it was used in."""
    model, case = build_plain(prefix_attention), trees.make_case("depth_3")
    calls = dict.fromkeys(dict(model.named_parameters()), 0)

    def count(_, name):
        calls[name] += 1

    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(functools.partial(count, name=name))
    with replay_of(model, case) as replay:
        replay.backward(case.rows, dense.weighted_sum)
        assert set(calls.values()) == {1}
        replay.logprobs(*trees.pad(case.rows)).sum().backward()
        assert set(calls.values()) == {2}


class _Checkpointed(nn.Module):
    def __init__(self, block):
        super().__init__()
        self.block = block

    def forward(self, *args):
        return torch.utils.checkpoint.checkpoint(self.block, *args, use_reentrant=False)


@pytest.mark.parametrize("activations", ["layer_inputs", "recompute", "all"])
def test_attention_is_pure_under_checkpoint(activations):
    case = trees.make_case("depth_3")
    model = build_plain(prefix_attention)
    model.layers = nn.ModuleList(_Checkpointed(block) for block in model.layers)
    got = replay_gradients(model, case, prefix_activations=activations)
    want = dense.weighted_gradients(_model(), case.rows)
    assert dense.relative_l2({n.replace("block.", ""): g for n, g in got.items()}, want) < FP64


def test_pages_of_old_weights_are_never_read_again():
    """The version of the parameters is part of a page's key: after an optimizer step every page is a miss."""
    model, case = build_plain(prefix_attention), trees.make_case("one_level")
    with replay_of(model, case) as replay:
        held = replay.logprobs(*trees.pad(case.rows))
        puts = replay.store.stats().puts
        again = replay.logprobs(*trees.pad(case.rows))
        assert torch.equal(held, again)
        pages = replay.store.stats().pages
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.1)
        moved = replay.logprobs(*trees.pad(case.rows))
        assert replay.store.stats().pages > pages
        assert replay.store.stats().puts > puts
        torch.testing.assert_close(moved, dense.logprobs(model, case.rows), rtol=1e-12, atol=1e-12)
        with pytest.raises(ParameterChangedError, match="embed") as changed:
            held.sum().backward()
        del held, again, moved, changed  # the traceback holds the graph too


def test_debug_sees_a_page_that_pop_would_not_recompute():
    model, case = build_plain(prefix_attention), trees.make_case("one_level")

    def tampering(logps, row):
        model.layers[1].qkv.weight.data.mul_(1.01)  # behind autograd's version counter
        return dense.weighted_sum(logps, row)

    with (
        replay_of(model, case) as replay,
        pytest.raises(ParameterChangedError, match=r"layer 1.*bit-identical"),
    ):
        replay.backward(case.rows, tampering)


class _Dropped(nn.Module):
    def __init__(self, block):
        super().__init__()
        self.block, self.dropout = block, nn.Dropout(0.3)

    def forward(self, *args):
        return self.dropout(self.block(*args))


@pytest.mark.parametrize("activations", ["layer_inputs", "recompute", "all"])
def test_dropout_is_refused_or_recomputed_with_the_same_masks(activations):
    """Where sharing is meant, a node's masks are drawn once: debug mode compares its pages bit for bit."""
    model, case = build_plain(prefix_attention), trees.make_case("depth_3")
    model.layers = nn.ModuleList(_Dropped(block) for block in model.layers)
    with pytest.raises(ModelRefusedError, match=r"layers\.0\.dropout \(Dropout\).*0\.3"):
        replay_gradients(model, case, check_model=True)
    torch.manual_seed(5)
    got = replay_gradients(model, case, check_model=True, share_dropout=True, prefix_activations=activations)
    assert all(bool(torch.isfinite(g).all()) for g in got.values())
    model.eval()
    want = replay_gradients(model, case)
    assert dense.relative_l2(got, want) > 0.1


def test_pages_that_travel_through_every_tier_change_nothing(tmp_path):
    case = trees.make_case("depth_3")
    want = dense.weighted_gradients(_model(), case.rows)
    options = {"device": "24KiB", "host": "64KiB", "disk": tmp_path, "disk_capacity": "64MiB"}
    with open_store(**options) as store:
        BranchReplay(_model(), store, check_model=False, debug=True, **case.options).backward(
            case.rows, dense.weighted_sum
        )
        moved = store.stats().bytes_moved
    assert dense.relative_l2(dense.gradients(_model()), want) < FP64
    assert sum(n for way, n in moved.items() if "disk" in way) > 0
