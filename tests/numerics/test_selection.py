"""Sparse selection: queries attend to the keys that an indexer ranks highest, over pages that come one by one.

The models' experts compute in fp32, in which they are tested. A selection is a choice: where two keys' scores are as
close as rounding, dense training and a replay may choose either, as two runs of dense training on other hardware may.
The tiny models have none so close.
"""

import functools

import dense
import model_zoo
import pytest
import trees
from losses import grpo, make_batch
from runs import (
    check_through_host_and_disk,
    cuts_of,
    dense_objective,
    objective_gradients,
    replay_gradients,
    replay_of,
)

from tiercache import open_store
from tiercache.codecs import CODECS
from tiercache.errors import ModelRefusedError
from tiercache.runtime import BranchReplay, selection
from tiercache.runtime.adapters import indexed
from tiercache.runtime.adapters.base import Router

LIMIT = 1e-5
FAMILIES = tuple(model_zoo.SELECTIONS)
ACTIVATIONS = ("layer_inputs", "recompute", "attention", "all")


@functools.cache
def _model(name="deepseek_v32"):
    return model_zoo.build(name)


@functools.cache
def _case(name):
    return trees.make_case(name)


@functools.cache
def _dense(name, tree):
    return dense.weighted_gradients(_model(name), _case(tree).rows)


def _error(name, tree, **options):
    got = replay_gradients(_model(name), _case(tree), **options)
    return dense.relative_l2(got, _dense(name, tree))


@pytest.mark.parametrize("tree", ["depth_3", "chain_of_5"])
@pytest.mark.parametrize("name", FAMILIES)
def test_backward(name, tree):
    assert _error(name, tree) < LIMIT


@pytest.mark.parametrize("activations", ACTIVATIONS[1:])
@pytest.mark.parametrize("name", ["deepseek_v32", "glm_moe_dsa"])
def test_what_capture_leaves(name, activations):
    assert _error(name, "chain_of_2", prefix_activations=activations) < LIMIT


@pytest.mark.long
@pytest.mark.parametrize("activations", ACTIVATIONS)
@pytest.mark.parametrize("name", FAMILIES)
def test_whole_product(name, activations):
    errors = {tree: _error(name, tree, prefix_activations=activations) for tree in trees.NAMES}
    assert all(error < LIMIT for error in errors.values()), errors


def test_attending_to_every_key_would_be_wrong(monkeypatch):
    attend = Router.attend
    monkeypatch.setattr(Router, "attend", lambda *args, **kw: attend(*args, **{**kw, "selection": None}))
    assert _error("deepseek_v32", "depth_3") > 0.1


def test_the_best_of_the_last_page_alone_would_be_wrong(monkeypatch):
    monkeypatch.setattr(selection, "_improve", lambda *_: None)
    assert _error("deepseek_v32", "depth_3") > 0.1


def test_indexers_get_no_gradient_as_in_dense_training():
    want, got = _dense("deepseek_v32", "depth_3"), replay_gradients(_model(), _case("depth_3"))
    assert not any("indexer" in name for name in want)
    assert set(got) == set(want)


@pytest.mark.parametrize("activations", ACTIVATIONS)
@pytest.mark.parametrize("name", ["deepseek_v32", "glm_moe_dsa"])
def test_pop_attends_to_what_capture_selected(name, activations, monkeypatch):
    """It ranks nothing, so it cannot choose otherwise."""
    rank, phases = indexed.select, set()

    def watched(frame, index, ranked, top_k):
        def noted(*args):
            phases.add(frame.phase)
            return ranked(*args)

        return rank(frame, index, noted, top_k)

    monkeypatch.setattr(indexed, "select", watched)
    replay_gradients(_model(name), _case("chain_of_2"), prefix_activations=activations)
    assert phases == {"capture", "replay", "score"}


def test_pages_of_an_indexer():
    shapes, case = {}, _case("chain_of_1")
    with replay_of(_model(), case) as replay:
        put = replay.store.put
        replay.store.put = lambda k, t, **kw: (shapes.setdefault(k.kind, t.shape), put(k, t, **kw))[1]
        replay.backward(case.rows, dense.weighted_sum)
        sizes = replay.engine.page_sizes()
    assert shapes["index_key"] == (1, 20, 8)
    assert shapes["selection"] == (20, 5)
    assert shapes["latent"] == (1, 20, 12)
    assert sizes["prefix_bytes_per_token"] == 2 * 4 * (12 + 4 + 8 + 5)


@pytest.mark.parametrize("mode", ["detached", 7])
def test_constant_prefixes(mode):
    """What the queries of a constant node selected is not kept."""
    _model().zero_grad(set_to_none=True)
    kinds, case = set(), _case("one_level")
    with replay_of(_model(), case, prefix_gradient=mode) as replay:
        cuts = cuts_of(replay, case.rows)
        put = replay.store.put
        replay.store.put = lambda k, t, **kw: (kinds.add(k.kind), put(k, t, **kw))[1]
        replay.backward(case.rows, dense.weighted_sum)
    got = dense.gradients(_model())
    want = dense.weighted_gradients(_model(), case.rows, cuts)
    assert dense.relative_l2(got, want) < LIMIT
    assert dense.relative_l2(got, _dense("deepseek_v32", "one_level")) > 0.01
    assert ("selection" in kinds) is (mode != "detached")


def test_grpo_over_left_padded_logprobs():
    model, case = _model(), _case("shared_scores")
    batch = make_batch(dense.logprobs(model, case.rows, "left"), trees.pad(case.rows, "left")[2])
    objective = functools.partial(grpo, batch=batch)
    logps, got = objective_gradients(model, case, objective, "left")
    want_logps, want = dense_objective(model, case.rows, objective, "left")
    assert (logps - want_logps).norm() < LIMIT * want_logps.norm()
    assert dense.relative_l2(got, want) < LIMIT


@pytest.mark.parametrize(
    "options",
    [{}, {"prefix_activations": "recompute"}, {"prefix_activations": "all"}, {"prefix_gradient": 3},
     {"prefix_gradient": "detached"}],
    ids=str,
)  # fmt: skip
def test_plan_equals_the_run(options, monkeypatch):
    case, plans = _case("depth_3"), []
    with open_store("64MiB") as store:
        replay = BranchReplay(_model("glm_moe_dsa"), store, check_model=False, **case.options, **options)
        follow = store.follow
        monkeypatch.setattr(store, "follow", lambda plan: (plans.append(plan), follow(plan)))
        with store.record_accesses() as record:
            replay.backward(case.rows, dense.weighted_sum)
    assert [(a.operation, a.key) for a in plans[0].accesses] == list(record)


@pytest.mark.parametrize("codec", [name for name, codec in CODECS.items() if codec().lossless])
def test_through_host_and_disk_by_every_lossless_codec(codec, tmp_path):
    check_through_host_and_disk(_model(), _case("chain_of_5"), codec, tmp_path)


@pytest.mark.parametrize("name", FAMILIES)
def test_construction_proves_them(name):
    with open_store(device="16MiB") as store:
        BranchReplay(_model(name), store)
        assert store.stats().pages == 0


def test_a_selection_that_goes_wrong_is_refused(monkeypatch):
    monkeypatch.setattr(selection, "_improve", lambda *_: None)
    with (
        open_store(device="16MiB") as store,
        pytest.raises(ModelRefusedError, match="index_topk 16 instead of 5"),
    ):
        BranchReplay(_model(), store)
