"""TRL over a store: adapters, evaluation, checkpoints, the user's own subclass, and what is refused by name."""

import pytest
import tiny_trl
import torch
from peft import LoraConfig, get_peft_model
from trl import DPOTrainer, GRPOTrainer

from tiercache import open_store
from tiercache.errors import ConfigError
from tiercache.runtime.trainers.trl import TierDPOTrainer, TierGRPOTrainer, TreeTrainer

pytestmark = [tiny_trl.WARNINGS, pytest.mark.filterwarnings("ignore::UserWarning")]
PROMPTS_SHARED = {"min_shared_tokens": 16}
LORA = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], init_lora_weights=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_trl.save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def store():
    with open_store(device="64MiB") as opened:
        yield opened


def build(trainer, folder, store=None, model=None, watch=None, **config):
    given = {} if store is None else {"store": store, "replay_options": PROMPTS_SHARED}
    common = {
        "model": model or tiny_trl.load_model(folder),
        "processing_class": tiny_trl.tokenizer(),
        "callbacks": [watch] if watch else None,
        **given,
    }
    if issubclass(trainer, GRPOTrainer):
        return trainer(
            reward_funcs=tiny_trl.reward,
            args=tiny_trl.grpo_config(folder, **{"max_steps": 3, **config}),
            train_dataset=tiny_trl.prompts(),
            eval_dataset=tiny_trl.prompts(2),
            **common,
        )
    args = tiny_trl.dpo_config(folder, **{"max_steps": 3, **config})
    return trainer(args=args, train_dataset=tiny_trl.pairs(), eval_dataset=tiny_trl.pairs(4), **common)


def distance(plain, tier, folder, store, make_model=None, **config):
    watches = []
    for kind, given in ((plain, None), (tier, store)):
        watches.append(tiny_trl.Watch())
        torch.manual_seed(0)
        model = make_model() if make_model else None
        build(kind, folder, given, model, watches[-1], **config).train()
    return watches[1].distance(watches[0])


def adapted(folder):
    return get_peft_model(tiny_trl.load_model(folder), LORA)


@pytest.mark.parametrize("pair", [(GRPOTrainer, TierGRPOTrainer), (DPOTrainer, TierDPOTrainer)])
def test_lora_follows_trl(folder, store, pair):
    assert distance(*pair, folder, store, make_model=lambda: adapted(folder)) <= 1e-3


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


@pytest.mark.long
def test_dpo_options_follow_trl(folder, store):
    config = {"loss_type": ["ipo", "sft"], "precompute_ref_log_probs": False}
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


@pytest.mark.parametrize("pair", [(GRPOTrainer, TierGRPOTrainer), (DPOTrainer, TierDPOTrainer)])
def test_evaluation_gives_trls_loss(folder, store, pair):
    torch.manual_seed(0)
    want = build(pair[0], folder, per_device_eval_batch_size=4).evaluate()
    torch.manual_seed(0)
    got = build(pair[1], folder, store, per_device_eval_batch_size=4).evaluate()
    assert got["eval_loss"] == pytest.approx(want["eval_loss"], rel=1e-4, abs=1e-6)
    assert store.stats().pages == 0


def test_a_checkpoint_resumes(folder, store, tmp_path):
    config = {"save_strategy": "steps", "save_steps": 2, "output_dir": str(tmp_path), "max_steps": 4}
    whole, again = tiny_trl.Watch(), tiny_trl.Watch()
    build(TierDPOTrainer, folder, store, watch=whole, **config).train()
    build(TierDPOTrainer, folder, store, watch=again, **config).train(
        resume_from_checkpoint=str(tmp_path / "checkpoint-2")
    )
    assert len(again.vectors) == 1 + 2
    moved = (whole.vectors[-1] - whole.vectors[0]).norm()
    assert (again.vectors[-1] - whole.vectors[-1]).norm() <= 1e-3 * moved


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
        build(trainer, folder, store, **config)


@pytest.mark.parametrize("name", ["tools", "rollout_func", "environment_factory"])
def test_unsupported_arguments_are_refused_by_name(folder, store, name):
    with pytest.raises(ConfigError, match=name):
        TierGRPOTrainer(
            tiny_trl.load_model(folder),
            tiny_trl.reward,
            args=tiny_trl.grpo_config(folder),
            train_dataset=tiny_trl.prompts(),
            processing_class=tiny_trl.tokenizer(),
            store=store,
            **{name: [print]},
        )
