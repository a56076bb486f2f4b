"""GRPO over a store follows TRL's own trainer step by step."""

import pytest
import tiny_trl
from trl import GRPOTrainer

from tiercache import open_store
from tiercache.runtime.trainers.trl import TierGRPOTrainer

pytestmark = tiny_trl.WARNINGS
PROMPTS_SHARED = {"min_shared_tokens": 16}


def run(folder, trainer=GRPOTrainer, steps=tiny_trl.STEPS, given=None, model=None, **config):
    watch = tiny_trl.Watch()
    built = trainer(
        model=model or tiny_trl.load_model(folder),
        reward_funcs=tiny_trl.reward,
        args=tiny_trl.grpo_config(folder, max_steps=steps, **config),
        train_dataset=tiny_trl.prompts(),
        processing_class=tiny_trl.tokenizer(),
        callbacks=[watch],
        **(given or {}),
    )
    built.train()
    return built, watch


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_trl.save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def dense(folder):
    return run(folder)


@pytest.fixture
def store():
    with open_store(device="64MiB") as opened:
        yield opened
        assert opened.stats().pages == 0, "a step left pages behind"


def test_20_steps_follow_trl(folder, dense, store):
    given = {"store": store, "replay_options": PROMPTS_SHARED}
    mine, watch = run(folder, TierGRPOTrainer, given=given)
    assert len(watch.vectors) == 1 + tiny_trl.STEPS
    assert watch.distance(dense[1]) <= 1e-3
    for name in ("loss", "kl", "entropy", "clip_ratio/region_mean", "completions/mean_length"):
        want, got = (tiny_trl.logged(t, name) for t in (dense[0], mine))
        assert got == pytest.approx(want, rel=1e-3, abs=1e-4), name


@pytest.mark.parametrize("batch", [1, 4])
def test_each_prompt_is_captured_once_a_step(folder, store, batch):
    given = {"store": store, "replay_options": PROMPTS_SHARED}
    config = {"per_device_train_batch_size": batch, "gradient_accumulation_steps": 8 // batch}
    mine, _ = run(folder, TierGRPOTrainer, steps=2, given=given, **config)
    report = mine.step_report
    assert (report.num_rows, report.num_nodes) == (8, 2)
    assert report.captured_tokens == 2 * tiny_trl.PROMPT_TOKENS
    assert report.dense_tokens == 8 * tiny_trl.PROMPT_TOKENS + report.tail_tokens


def test_the_first_steps_with_a_detached_prefix_do_not(folder, dense, store):
    given = {"store": store, "replay_options": {**PROMPTS_SHARED, "prefix_gradient": "detached"}}
    _, watch = run(folder, TierGRPOTrainer, steps=5, given=given)
    assert watch.distance(dense[1]) > 1e-3
