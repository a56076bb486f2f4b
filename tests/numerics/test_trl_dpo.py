"""DPO over a store follows TRL's own trainer step by step."""

import pytest
import tiny_trl
from trl import DPOTrainer

from tiercache import open_store
from tiercache.runtime.trainers.trl import TierDPOTrainer

pytestmark = tiny_trl.WARNINGS
PROMPTS_SHARED = {"min_shared_tokens": 16}


def run(folder, trainer=DPOTrainer, steps=tiny_trl.STEPS, given=None, **config):
    watch = tiny_trl.Watch()
    built = trainer(
        model=tiny_trl.load_model(folder),
        args=tiny_trl.dpo_config(folder, max_steps=steps, **config),
        train_dataset=tiny_trl.pairs(),
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
    mine, watch = run(folder, TierDPOTrainer, given={"store": store, "replay_options": PROMPTS_SHARED})
    assert len(watch.vectors) == 1 + tiny_trl.STEPS
    assert watch.distance(dense[1]) <= 1e-3
    for name in (
        "loss",
        "entropy",
        "logits/chosen",
        "mean_token_accuracy",
        "rewards/margins",
        "logps/rejected",
    ):
        want, got = (tiny_trl.logged(t, name) for t in (dense[0], mine))
        assert got == pytest.approx(want, rel=1e-3, abs=1e-4), name


def test_the_first_steps_with_a_detached_prefix_do_not(folder, dense, store):
    options = {**PROMPTS_SHARED, "prefix_gradient": "detached"}
    _, watch = run(folder, TierDPOTrainer, steps=5, given={"store": store, "replay_options": options})
    assert watch.distance(dense[1]) > 1e-3


def test_a_step_is_one_tree(folder, store):
    given = {"store": store, "replay_options": PROMPTS_SHARED}
    mine, _ = run(folder, TierDPOTrainer, steps=1, given=given, gradient_accumulation_steps=16)
    assert mine.step_report.num_rows == 32
    assert mine.step_report.captured_tokens == 8 * tiny_trl.PROMPT_TOKENS


def test_reference_pages_are_read_in_the_second_step(folder, tmp_path):
    with open_store(device="8MiB", disk=tmp_path, disk_capacity="64MiB") as store:
        given = {"store": store, "replay_options": PROMPTS_SHARED, "reference_prompts": 64}
        # 32 rows a step: both steps have all 8 prompts
        mine, _ = run(folder, TierDPOTrainer, steps=2, given=given, gradient_accumulation_steps=16)
        assert mine.reference.reused_tokens == 8 * tiny_trl.PROMPT_TOKENS
        assert mine.reference.report.captured_tokens == 0
