"""The traps of recurrent states, each with its name; and their pages' way through tiers, codecs and the plan."""

import functools

import dense
import model_zoo
import pytest
import torch
import trees
from runs import replay_gradients, replay_of

from tiercache import open_store
from tiercache.codecs import CODECS
from tiercache.entry import PageKey
from tiercache.runtime import BranchReplay
from tiercache.runtime.adapters import recurrent
from tiercache.runtime.frame import Ancestor, Frame, Piece
from tiercache.runtime.rows import check_rows
from tiercache.runtime.states import LayerStates


@functools.cache
def _model(name):
    return model_zoo.build(name)


def _error(name, case, **options):
    want = dense.weighted_gradients(_model(name), case.rows)
    return dense.relative_l2(replay_gradients(_model(name), case, **options), want)


def _short_runs():
    """Tails of one token, alone and in company, and a run of one token that is shared below a parent."""
    m = trees._Maker(model_zoo.VOCAB, 11)
    prompt, fork = m.tokens(9), m.tokens(1)
    tails = [(m.tokens(1),), (fork, m.tokens(1)), (fork, m.tokens(4)), (m.tokens(1),)]
    rows = [m.row(prompt, *tail, scored_from=5) for tail in tails]
    return trees.Case(rows, {"min_shared_tokens": 1})


@pytest.mark.parametrize(
    "options", [{}, {"max_visit_tokens": 1}, {"max_node_tokens": 1}, {"prefix_gradient": 99}]
)
@pytest.mark.parametrize("name", ["lfm2", "qwen3_next", "bamba", "mamba"])
def test_one_token_never_takes_the_step_of_generation(name, options):
    case = _short_runs()
    with replay_of(_model(name), case, **options) as replay:
        tree = replay.engine.make_tree(check_rows(case.rows, model_zoo.VOCAB))
    assert all(len(n.tokens) > 1 or n.is_leaf or n.parent < 0 for n in tree.nodes)
    assert _error(name, case, **options) < 1e-5


def test_the_step_of_generation_would_write_in_place(monkeypatch):
    """What the trap is: with tails left at one token, the layer overwrites the state that its siblings need."""
    monkeypatch.setattr(recurrent, "SHORTEST_NODE", 1)
    with pytest.raises(RuntimeError, match=r"in-place|single memory location"):
        _error("bamba", _short_runs(), max_visit_tokens=1)


@pytest.mark.parametrize("window", range(1, 9))
def test_a_window_never_cuts_a_node_to_one_token(window):
    case = trees.make_case("depth_3")
    with replay_of(_model("lfm2"), case, prefix_gradient=window) as replay:
        tree = replay.engine.make_tree(check_rows(case.rows, model_zoo.VOCAB))
    assert all(len(n.tokens) > 1 or n.is_leaf or n.parent < 0 for n in tree.nodes)


@pytest.mark.parametrize("name", ["lfm2", "qwen3_5", "granite_hybrid"])
def test_every_tail_of_a_batch_starts_from_the_parents_state(name):
    case = trees.make_case("one_level")
    together, alone = (_error(name, case, max_visit_tokens=n) for n in (64, 1))
    assert max(together, alone) < 1e-5


def test_tails_that_follow_each_other_through_the_layer_would_be_wrong(monkeypatch):
    one_line = functools.partial(LayerStates, batch=1)
    monkeypatch.setattr(recurrent, "LayerStates", lambda frame, index, name, _: one_line(frame, index, name))
    monkeypatch.setattr(recurrent, "_side_by_side", lambda packed, frame: packed)
    monkeypatch.setattr(recurrent, "_one_after_the_other", lambda lines, frame: lines[:1])
    assert _error("lfm2", trees.make_case("one_level")) > 0.01


def test_end_states_of_siblings_do_not_alias():
    """A layer may do to its states what it likes: the page, and what siblings are given, stay as they were."""
    with open_store(device="1MiB") as store:
        store.put(PageKey(b"p" * 32, 0, "state"), torch.ones(1, 2, 3))
        pieces, parent = [Piece(1, b"c" * 32, 0, 4, 4)], Ancestor(b"p" * 32, 0, 4, trainable=True)
        frame = Frame(store, 1, pieces, [parent], torch.device("cpu"), "capture")
        first, second = (LayerStates(frame, 0, "layer", 1) for _ in range(2))
        with torch.no_grad():
            first.get_recurrent_state().mul_(7)
            first.update_recurrent_state(first.get_recurrent_state())
            first.relay(torch.zeros(1, 4, 5))
            first.ends["state"].mul_(3)
        assert torch.equal(second.get_recurrent_state(), torch.ones(1, 2, 3))
        with store.read(PageKey(b"c" * 32, 0, "state")) as lease:
            assert torch.equal(lease.tensor, torch.full((1, 2, 3), 7.0))
        store.discard([PageKey(b"p" * 32, 0, "state"), PageKey(b"c" * 32, 0, "state")])


def test_layers_may_leave_their_index_out():
    pieces = [Piece(0, b"r" * 32, 0, 2, 0)]
    states = LayerStates(Frame(None, 1, pieces, [], torch.device("cpu"), "score"), 3, "layer", 1)
    seen = states.update_conv_state(torch.ones(1, 2, 2), conv_kernel_size=4)
    states.update_recurrent_state(torch.ones(1, 2))
    assert seen.shape[-1] == 2
    assert states.ends["conv_state"].tolist() == [[[0, 0, 1, 1]] * 2]
    assert states.get_recurrent_state() is None


def test_recurrent_states_stay_fp32_in_a_bf16_model():
    model, case = model_zoo.build("qwen3_next", dtype=torch.bfloat16), trees.make_case("chain_of_2")
    dtypes = {}
    with replay_of(model, case) as replay:
        put, accumulate = replay.store.put, replay.store.accumulate

        def watched(key, tensor, **kw):
            dtypes[key.kind] = tensor.dtype
            return put(key, tensor, **kw)

        replay.store.put = watched
        replay.store.accumulate = lambda k, t: (dtypes.setdefault(k.kind, t.dtype), accumulate(k, t))[1]
        replay.backward(case.rows, dense.weighted_sum)
    assert dtypes["state"] == dtypes["grad_state"] == torch.float32
    assert dtypes["conv_state"] == dtypes["key"] == torch.bfloat16


@pytest.mark.parametrize("length", [8, 64])
def test_a_states_page_does_not_grow_with_its_node(length):
    m, sizes = trees._Maker(model_zoo.VOCAB, 2), {}
    prompt = m.tokens(length)
    case = trees.Case([m.row(prompt, m.tokens(4)) for _ in range(2)], {"min_shared_tokens": 1})
    with replay_of(_model("falcon_h1"), case) as replay:
        put = replay.store.put
        replay.store.put = lambda k, t, **kw: (sizes.setdefault(k.kind, t.shape), put(k, t, **kw))[1]
        replay.backward(case.rows, dense.weighted_sum)
    assert sizes["state"] == (1, 4, 8, 8)
    assert sizes["conv_state"] == (1, 64, 4)
    assert sizes["key"] == (2, length, 8)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"prefix_activations": "recompute"},
        {"prefix_activations": "all"},
        pytest.param({"prefix_activations": "auto"}, marks=pytest.mark.long),
        {"prefix_gradient": 3},
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ["lfm2", "qwen3_next", "falcon_h1"])
def test_plan_equals_the_run(name, options, monkeypatch):
    for tree in ("depth_3", "rows_of_one"):
        case, plans = trees.make_case(tree), []
        with open_store("64MiB") as store:
            replay = BranchReplay(_model(name), store, check_model=False, **case.options, **options)
            follow = store.follow
            monkeypatch.setattr(store, "follow", lambda plan, f=follow, p=plans: (p.append(plan), f(plan)))
            with store.record_accesses() as record:
                replay.backward(case.rows, dense.weighted_sum)
        assert [(a.operation, a.key) for a in plans[0].accesses] == list(record)


@pytest.mark.parametrize("codec", [name for name, codec in CODECS.items() if codec().lossless])
def test_through_host_and_disk_by_every_lossless_codec(codec, tmp_path):
    model, case = _model("falcon_h1"), trees.make_case("chain_of_5")
    want = replay_gradients(model, case)
    options = {"device": "12KiB", "host": "16KiB", "disk": tmp_path, "disk_capacity": "64MiB", "codec": codec}
    with open_store(**options) as store:
        BranchReplay(model, store, check_model=False, debug=True, **case.options).backward(
            case.rows, dense.weighted_sum
        )
        moved = store.stats().bytes_moved
    got = dense.gradients(model)
    assert all(torch.equal(got[name], want[name]) for name in want)
    assert sum(n for way, n in moved.items() if "disk" in way) > 0


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # PEFT asks a new model so
def test_lora_on_a_recurrent_layer():
    from peft import LoraConfig, get_peft_model

    targets = ["in_proj_qkvz", "out_proj", "q_proj", "down_proj"]
    model = get_peft_model(model_zoo.build("qwen3_next"), LoraConfig(r=4, target_modules=targets))
    model_zoo.randomise(model, 1)
    case = trees.make_case("depth_3")
    want = dense.weighted_gradients(model, case.rows)
    assert set(want) == {n for n, p in model.named_parameters() if p.requires_grad}
    assert dense.relative_l2(replay_gradients(model, case), want) < 1e-5
