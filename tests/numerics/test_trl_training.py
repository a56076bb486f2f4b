"""GRPO and DPO over a store follow TRL's own trainers step by step."""

from typing import Any

import pytest
import quantised
import tiny_trl
from trl import DPOTrainer, GRPOTrainer

from tiercache import open_store
from tiercache.runtime.trainers.trl import TierDPOTrainer, TierGRPOTrainer

pytestmark = [tiny_trl.WARNINGS, pytest.mark.filterwarnings("ignore::UserWarning")]
PAIRS = {"grpo": (GRPOTrainer, TierGRPOTrainer), "dpo": (DPOTrainer, TierDPOTrainer)}
LOGGED = {
    "grpo": ("loss", "kl", "entropy", "clip_ratio/region_mean", "completions/mean_length"),
    "dpo": ("loss", "entropy", "logits/chosen", "mean_token_accuracy", "rewards/margins", "logps/rejected"),
}


def _adapted(folder):
    return quantised.adapted(tiny_trl.load_model(folder))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_trl.save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module", params=PAIRS)
def dense(request, folder) -> tuple[str, Any, tiny_trl.Watch]:
    """TRL's own run of each kind."""
    return request.param, *tiny_trl.train(PAIRS[request.param][0], folder, max_steps=tiny_trl.STEPS)


@pytest.fixture
def store():
    with open_store(device="64MiB") as opened:
        yield opened
        assert opened.stats().pages == 0, "a step left pages behind"


def test_20_steps_follow_trl(folder, dense, store):
    kind, theirs, their_way = dense
    mine, way = tiny_trl.train(PAIRS[kind][1], folder, store, max_steps=tiny_trl.STEPS)
    assert len(way.vectors) == 1 + tiny_trl.STEPS
    assert way.distance(their_way) <= 1e-3
    for name in LOGGED[kind]:
        want, got = (tiny_trl.logged(trainer, name) for trainer in (theirs, mine))
        assert got == pytest.approx(want, rel=1e-3, abs=1e-4), name


def test_the_first_steps_with_a_detached_prefix_do_not(folder, dense, store):
    kind, _, their_way = dense
    given = {"replay_options": {**tiny_trl.PROMPTS_SHARED, "prefix_gradient": "detached"}}
    _, way = tiny_trl.train(PAIRS[kind][1], folder, store, max_steps=5, given=given)
    assert way.distance(their_way) > 1e-3


@pytest.mark.parametrize("batch", [1, 4])
def test_each_prompt_is_captured_once_a_step_of_grpo(folder, store, batch):
    config = {"per_device_train_batch_size": batch, "gradient_accumulation_steps": 8 // batch}
    mine, _ = tiny_trl.train(TierGRPOTrainer, folder, store, max_steps=1, **config)
    report = mine.step_report
    assert (report.num_rows, report.num_nodes) == (8, 2)
    assert report.captured_tokens == 2 * tiny_trl.PROMPT_TOKENS
    assert report.dense_tokens == 8 * tiny_trl.PROMPT_TOKENS + report.tail_tokens


def test_a_step_of_dpo_is_one_tree(folder, store):
    mine, _ = tiny_trl.train(TierDPOTrainer, folder, store, max_steps=1, gradient_accumulation_steps=16)
    assert mine.step_report.num_rows == 32
    assert mine.step_report.captured_tokens == 8 * tiny_trl.PROMPT_TOKENS


@pytest.mark.parametrize("load", [tiny_trl.load_model, _adapted], ids=["frozen_model", "adapters_off"])
@pytest.mark.parametrize("trainer", [TierGRPOTrainer, TierDPOTrainer])
def test_reference_pages_are_read_in_the_second_step(folder, tmp_path, trainer, load):
    # 32 rows a step: both steps have all 8 prompts
    rows = {"gradient_accumulation_steps": 32 if trainer is TierGRPOTrainer else 16}
    with open_store(device="8MiB", disk=tmp_path, disk_capacity="64MiB") as store:
        config = {"given": {"reference_prompts": 64}, "max_steps": 2, "model": load(folder), **rows}
        mine, _ = tiny_trl.train(trainer, folder, store, **config)
        assert mine.step_report.num_rows == 32
        reused_prompts, rest = divmod(mine.reference.reused_tokens, tiny_trl.PROMPT_TOKENS)
        # where all completions of a group happen to open alike, their node is longer than the prompt, and a new one
        assert reused_prompts >= (6 if trainer is TierGRPOTrainer else 8)
        assert rest == 0
        assert (mine.reference.report.captured_tokens == 0) is (reused_prompts == 8)
