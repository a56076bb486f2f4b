"""Latent attention: pages hold what the cache of a DeepSeek model would, and gradients go through the expansion."""

import functools

import dense
import model_zoo
import pytest
import torch
import trees
from runs import check_through_host_and_disk, replay_gradients, replay_of

from tiercache import open_store
from tiercache.codecs import CODECS
from tiercache.runtime import BranchReplay, latents
from tiercache.runtime.adapters.latent import latent_layers

FAMILIES = ("deepseek_v3", "deepseek_v2", "glm4_moe_lite", "minicpm3", "youtu")


@functools.cache
def _model(name="deepseek_v3"):
    return model_zoo.build(name)


@functools.cache
def _dense(tree, name="deepseek_v3"):
    return dense.weighted_gradients(_model(name), trees.make_case(tree).rows)


def _error(tree, name="deepseek_v3", **options):
    got = replay_gradients(_model(name), trees.make_case(tree), **options)
    return dense.relative_l2(got, _dense(tree, name))


@pytest.mark.parametrize("activations", ["layer_inputs", "recompute", "attention", "all"])
def test_what_capture_leaves(activations):
    assert _error("chain_of_2", prefix_activations=activations) < 1e-5


@pytest.mark.parametrize("name", FAMILIES[1:])
def test_families(name):
    assert len(latent_layers(_model(name))) == 2
    assert _error("chain_of_2", name) < 1e-5
    with open_store(device="16MiB") as store:
        BranchReplay(_model(name), store)


def test_pages_hold_latents_and_the_shared_rotary_key():
    case, shapes = trees.make_case("chain_of_1"), {}
    with replay_of(_model(), case) as replay:
        put, accumulate = replay.store.put, replay.store.accumulate
        replay.store.put = lambda k, t, **kw: (shapes.setdefault(k.kind, t.shape), put(k, t, **kw))[1]
        replay.store.accumulate = lambda k, t: (shapes.setdefault(k.kind, t.shape), accumulate(k, t))[1]
        replay.backward(case.rows, dense.weighted_sum)
        shape = replay.engine.limits(20) and replay.engine._shape[1]
    assert shapes["latent"] == shapes["grad_latent"] == (1, 20, 12)
    assert shapes["rotary_key"] == shapes["grad_rotary_key"] == (1, 20, 4)
    assert not {"key", "value"} & set(shapes)
    assert shape.prefix_bytes_per_token == 2 * (12 + 4) * 4
    assert shape.expanded_bytes_per_token == 2 * 4 * (8 + 4 + 10) * 4


def test_expansion_weights_get_what_queries_of_later_nodes_owe_them(monkeypatch):
    assert _error("chain_of_2") < 1e-5

    def constant(self, key, value):
        grads = torch.autograd.grad(self._expanded, self._leaves, (key, value))
        return grads[0][0], grads[1][0]

    monkeypatch.setattr(latents.OpenPage, "gradients", constant)
    want, got = _dense("chain_of_2"), replay_gradients(_model(), trees.make_case("chain_of_2"))
    name = "model.layers.1.self_attn.kv_b_proj.weight"
    assert (got[name] - want[name]).norm() > 0.05 * want[name].norm()


@pytest.mark.parametrize(
    "options",
    [{}, {"prefix_activations": "recompute"}, {"prefix_activations": "all"}, {"prefix_gradient": 3}],
    ids=str,
)
def test_plan_equals_the_run(options, monkeypatch):
    case, plans = trees.make_case("depth_3"), []
    with open_store("64MiB") as store:
        replay = BranchReplay(_model(), store, check_model=False, **case.options, **options)
        follow = store.follow
        monkeypatch.setattr(store, "follow", lambda plan: (plans.append(plan), follow(plan)))
        with store.record_accesses() as record:
            replay.backward(case.rows, dense.weighted_sum)
    assert [(a.operation, a.key) for a in plans[0].accesses] == list(record)


@pytest.mark.parametrize("codec", [name for name, codec in CODECS.items() if codec().lossless])
def test_through_host_and_disk_by_every_lossless_codec(codec, tmp_path):
    check_through_host_and_disk(_model(), trees.make_case("chain_of_5"), codec, tmp_path)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # PEFT asks a new model so
def test_lora_on_the_expansion():
    from peft import LoraConfig, get_peft_model

    targets = ["kv_a_proj_with_mqa", "kv_b_proj", "q_b_proj"]
    model = get_peft_model(model_zoo.build("deepseek_v3"), LoraConfig(r=4, target_modules=targets))
    model_zoo.randomise(model, 1)
    case = trees.make_case("depth_3")
    want = dense.weighted_gradients(model, case.rows)
    assert any("kv_b_proj.lora_B" in name for name in want)
    assert dense.relative_l2(replay_gradients(model, case), want) < 1e-5


def test_bf16_errs_as_dense_training_does():
    exact, model = model_zoo.build("youtu"), model_zoo.build("youtu", dtype=torch.bfloat16)
    exact.load_state_dict(model.state_dict())
    case = trees.make_case("depth_3")
    want = dense.weighted_gradients(exact, case.rows)
    noise = dense.relative_l2(dense.weighted_gradients(model, case.rows), want)
    assert dense.relative_l2(replay_gradients(model, case), want) < 1.3 * noise
