"""TRL over a store: adapters, evaluation, checkpoints, the user's own subclass, and what is refused by name."""

from types import SimpleNamespace

import pytest
import quantised
import tiny_trl
import torch
from peft import PromptTuningConfig, get_peft_model
from transformers import TrainerCallback
from trl import DPOTrainer, GRPOTrainer

from tiercache import open_store
from tiercache.errors import ConfigError
from tiercache.runtime.trainers.refusals import refuse_model
from tiercache.runtime.trainers.trl import TierDPOTrainer, TierGRPOTrainer, TreeTrainer

pytestmark = [tiny_trl.WARNINGS, pytest.mark.filterwarnings("ignore::UserWarning")]
PAIRS = [(GRPOTrainer, TierGRPOTrainer), (DPOTrainer, TierDPOTrainer)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_trl.save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def store():
    with open_store(device="64MiB") as opened:
        yield opened


def distance(plain, tier, folder, store, make_model=lambda: None, **config):
    """Of the parameters of our run from those of TRL's."""
    ways = []
    for trainer, given in ((plain, None), (tier, store)):
        torch.manual_seed(0)
        model = make_model()
        ways.append(tiny_trl.train(trainer, folder, given, model=model, **{"max_steps": 3, **config})[1])
    return ways[1].distance(ways[0])


@pytest.mark.parametrize(
    ("pair", "load"),
    [
        (PAIRS[0], tiny_trl.load_model),
        (PAIRS[1], quantised.load_quantised),
        pytest.param(PAIRS[0], quantised.load_quantised, marks=pytest.mark.long),
        pytest.param(PAIRS[1], tiny_trl.load_model, marks=pytest.mark.long),
    ],
    ids=["lora_grpo", "qlora_dpo", "qlora_grpo", "lora_dpo"],
)
def test_adapters_follow_trl(folder, store, pair, load):
    assert distance(*pair, folder, store, make_model=lambda: quantised.adapted(load(folder))) <= 1e-3


@pytest.mark.parametrize(
    "config",
    [
        {"num_iterations": 2, "beta": 0.0, "loss_type": "grpo"},
        pytest.param(
            {"steps_per_generation": 16, "temperature": 0.7, "importance_sampling_level": "sequence"},
            marks=pytest.mark.long,
        ),
        pytest.param({"top_entropy_quantile": 0.5, "scale_rewards": "batch"}, marks=pytest.mark.long),
    ],
    ids=["old_log_probs", "two_steps_a_generation", "entropy_mask"],
)
def test_grpo_options_follow_trl(folder, store, config):
    assert distance(GRPOTrainer, TierGRPOTrainer, folder, store, **config) <= 1e-3


@pytest.mark.parametrize(
    "config",
    [
        {"use_weighting": True, "max_steps": 2, "activation_checkpointing": True},
        pytest.param({"loss_type": ["ipo", "sft"], "precompute_ref_log_probs": True}, marks=pytest.mark.long),
        pytest.param(
            {"ld_alpha": 0.5, "sync_ref_model": True, "ref_model_sync_steps": 1}, marks=pytest.mark.long
        ),
    ],
    ids=["weighted", "two_losses", "moving_reference"],
)
def test_dpo_options_follow_trl(folder, store, config):
    assert distance(DPOTrainer, TierDPOTrainer, folder, store, **config) <= 1e-3


def test_a_subclass_of_ones_own(folder, store):
    class Mine(GRPOTrainer):
        def _compute_loss(self, model, inputs):
            return super()._compute_loss(model, inputs) * 2

    class MineOverStore(TreeTrainer, Mine):
        tree_statistics = TierGRPOTrainer.tree_statistics
        _micro_batch = TierGRPOTrainer._micro_batch

    # Adam's first steps have one length whatever the gradient's, so they would hide a factor
    config = {"optim": "sgd", "learning_rate": 0.05, "max_grad_norm": 0.0}
    assert distance(Mine, MineOverStore, folder, store, **config) <= 1e-3


@pytest.mark.parametrize("pair", PAIRS)
def test_evaluation_gives_trls_loss(folder, store, pair):
    found = []
    for trainer, given in zip(pair, (None, store), strict=True):
        torch.manual_seed(0)
        found.append(tiny_trl.build(trainer, folder, given, per_device_eval_batch_size=4).evaluate())
    assert found[1]["eval_loss"] == pytest.approx(found[0]["eval_loss"], rel=1e-4, abs=1e-6)
    assert store.stats().pages == 0


@pytest.mark.parametrize("trainer", [TierGRPOTrainer, TierDPOTrainer])
def test_a_resumed_run_is_the_uninterrupted_one(folder, store, tmp_path, trainer):
    """Evaluated on the way, which must not disturb a step either."""
    config = {
        "save_strategy": "steps", "save_steps": 2, "output_dir": str(tmp_path), "max_steps": 4,
        "eval_strategy": "steps", "eval_steps": 2, "per_device_eval_batch_size": 4,
    }  # fmt: skip
    _, whole = tiny_trl.train(trainer, folder, store, **config)
    _, again = tiny_trl.train(trainer, folder, store, resume=tmp_path / "checkpoint-2", **config)
    assert len(again.vectors) == 1 + 2
    moved = (whole.vectors[-1] - whole.vectors[2]).norm()
    assert (again.vectors[0] - whole.vectors[2]).norm() <= 1e-6 * moved
    assert (again.vectors[-1] - whole.vectors[-1]).norm() <= 1e-3 * moved
    assert store.stats().pages == 0


@pytest.mark.parametrize(
    ("trainer", "config"),
    [
        (TierGRPOTrainer, {"use_adaptive_entropy": True}),
        (TierGRPOTrainer, {"entropy_coef": 0.1}),
        (TierGRPOTrainer, {"use_vllm": True}),
        (TierDPOTrainer, {"activation_offloading": True}),
        (TierDPOTrainer, {"torch_compile": True}),
    ],
    ids=str,
)
def test_unsupported_options_are_refused_by_name(folder, store, trainer, config):
    with pytest.raises(ConfigError, match=next(iter(config))):
        tiny_trl.build(trainer, folder, store, **config)


def test_an_option_is_refused_wherever_the_config_stands(folder, store):
    config = tiny_trl.grpo_config(folder, entropy_coef=0.1)
    with pytest.raises(ConfigError, match="entropy_coef"):
        TierGRPOTrainer(tiny_trl.load_model(folder), tiny_trl.reward, config, store=store)


@pytest.mark.parametrize(
    ("state", "name"),
    [
        ({"_is_vlm": True, "processing_class": None}, "processing_class"),
        ({"is_fsdp_enabled": True}, "fsdp"),
        ({"aux_loss_enabled": True, "router_aux_loss_coef": 0.01}, "router_aux_loss_coef"),
    ],
    ids=["images", "fsdp", "auxiliary_loss"],
)
def test_what_only_the_built_trainer_knows_is_refused_by_name(state, name):
    built = {"_is_vlm": False, "is_fsdp_enabled": False, "aux_loss_enabled": False}
    refuse_model(SimpleNamespace(**built))
    with pytest.raises(ConfigError, match=name):
        refuse_model(SimpleNamespace(**{**built, **state}))


@pytest.mark.parametrize("given", [{"reference_prompts": 8}, {"reference_weights_id": "mine"}], ids=str)
def test_options_of_a_reference_are_refused_without_one(folder, store, given):
    with pytest.raises(ConfigError, match=next(iter(given))):
        tiny_trl.build(TierGRPOTrainer, folder, store, given=given, beta=0.0)


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ({"store": "pages"}, "store"),
        ({"replay_options": {"temperature": 0.5}}, "temperature"),
        ({"reference_prompts": -1}, "reference_prompts"),
        ({"reference_prompts": "many"}, "reference_prompts"),
    ],
    ids=str,
)
def test_what_cannot_be_meant_is_refused_by_name(folder, store, given, name):
    with pytest.raises(ConfigError, match=name):
        tiny_trl.build(TierGRPOTrainer, folder, store, given=given)


class _Interrupt(TrainerCallback):
    """Ends the first run at its second micro-batch."""

    num_substeps = 0

    def on_substep_end(self, *_, **__):
        self.num_substeps += 1
        if self.num_substeps == 2:
            raise KeyboardInterrupt


def test_what_an_interrupted_run_left_is_no_part_of_the_next(folder, store):
    trainer = tiny_trl.build(TierDPOTrainer, folder, store, watch=_Interrupt(), max_steps=1)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    trainer.train()
    assert trainer.step_report.num_rows == 2 * trainer.args.gradient_accumulation_steps
    assert store.stats().pages == 0


def test_virtual_tokens_are_refused_by_name(folder, store):
    config = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    model = get_peft_model(tiny_trl.load_model(folder), config)
    with pytest.raises(ConfigError, match="peft_config: PromptTuningConfig"):
        tiny_trl.build(TierDPOTrainer, folder, store, model=model)


@pytest.mark.parametrize("name", ["tools", "rollout_func", "environment_factory"])
def test_unsupported_arguments_are_refused_by_name(folder, store, name):
    with pytest.raises(ConfigError, match=name):
        tiny_trl.build(TierGRPOTrainer, folder, store, given={name: [print]})
