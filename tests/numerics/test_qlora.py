"""LoRA over 4-bit weights: the adapters' gradients are those of dense training on the same quantised model."""

import dense
import model_zoo
import pytest
import quantised
import torch
import trees

from tiercache import open_store
from tiercache.runtime import BranchReplay
from tiercache.runtime.reference import Reference

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    # blocks of 64 weights must not straddle rows
    model_zoo.build("llama", dtype=torch.float32, hidden_size=64, intermediate_size=128).save_pretrained(
        folder
    )
    return folder


@pytest.mark.parametrize(
    ("twice", "activations"),
    [(False, "layer_inputs"), (True, "recompute")],
    ids=["nf4", "double_quantised"],
)
def test_adapters_gradients_are_those_of_dense_training(folder, twice, activations):
    model = quantised.adapted(quantised.load_quantised(folder, bnb_4bit_use_double_quant=twice))
    rows = trees.make_case("depth_3").rows
    want = dense.weighted_gradients(model, rows)
    assert 0 < len(want) == sum("lora_" in name for name, _ in model.named_parameters())
    model.zero_grad(set_to_none=True)
    with open_store(device="64MiB") as store:
        replay = BranchReplay(model, store, min_shared_tokens=1, prefix_activations=activations, debug=True)
        replay.backward(rows, dense.weighted_sum)
        assert replay.report.num_nodes > 1
        assert store.stats().pages == 0
    assert dense.relative_l2(dense.gradients(model), want) <= 1e-5


def test_the_proof_of_a_model_leaves_quantised_layers_in_training_mode(folder):
    """On processors with AVX512-BF16 a 4-bit layer repacks its weights in evaluation, and trains no more."""
    model = quantised.load_quantised(folder)
    layer = model.model.layers[0].self_attn.q_proj
    before, modes = layer.weight.data.clone(), []
    layer.register_forward_hook(lambda module, *_: modes.append(module.training))
    with open_store(device="64MiB") as store:
        BranchReplay(quantised.adapted(model), store, min_shared_tokens=1)
    assert modes
    assert all(modes)
    assert torch.equal(layer.weight.data, before)


def test_a_quantised_reference_is_read_the_second_time(folder):
    model = quantised.load_quantised(folder)
    rows = trees.make_case("depth_3").rows
    with open_store(device="64MiB") as store:
        reference = Reference(model, store, min_shared_tokens=1)
        want = dense.logprobs(model, rows)
        for reused in (False, True):
            got = reference.logprobs(*trees.pad(rows))
            assert torch.allclose(got, want, rtol=1e-5, atol=1e-5)
            assert (reference.reused_tokens > 0) is reused
        reference.clear()
