"""GRPO by TRL's own trainer and by ours, on SmolLM2-135M in fp32: the part of a step after generation.

Sampling is the same for both and not what is compared, so completions are cut from a text instead. The clock runs
from there to the end of the optimizer's step.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from replay_workload import load_weights
from transformers import PreTrainedTokenizerFast, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from tiercache import open_store
from tiercache.cli.peak_memory import PeakMemory
from tiercache.runtime.trainers.trl import TierGRPOTrainer

GENERATIONS = 8
SIZES = {"full": (1024, 64), "tiny": (320, 8)}  # prompt, completion
WARM_UP = (320, 8)
BUDGET = "64MiB"
# One row at a time keeps TRL smallest; the other is what it does unless told otherwise.
BATCHES: dict[str, dict[str, Any]] = {
    "trl": {
        "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": 8,
        "activation_checkpointing": False,
    },
    "trl_defaults": {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1},
}
BATCHES["trl_ours"] = BATCHES["trl"]
CONTENDERS = tuple(BATCHES)


class Meter(TrainerCallback):
    """Measures each step of a trainer whose completions are given."""

    def __init__(self) -> None:
        self.runs: list[dict[str, Any]] = []
        self._memory: PeakMemory | None = None

    def start(self) -> None:
        """Completions are there."""
        self._memory = PeakMemory()
        self._memory.__enter__()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The optimizer has stepped."""
        assert self._memory is not None
        self._memory.__exit__(None, None, None)
        self.runs.append({"seconds": self._memory.seconds, "peak_bytes": self._memory.peak_bytes})


def with_given_completions(
    trainer: type[Any], meter: Meter, steps: list[list[tuple[list[int], list[int]]]]
) -> Any:
    """The trainer, sampling nothing.

    Args:
        trainer: class to derive from.
        meter: told when the completions are there.
        steps: for each step (prompt, completion) of its rows, as token ids.
    """

    class Given(trainer):  # type: ignore[misc]
        def _tokenize_prompts(self, prompts: list[str]) -> Any:
            return [prompt for prompt, _ in steps[0]], None, {}

        def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
            completions = [completion for _, completion in steps.pop(0)]
            meter.start()
            return completions, None

    return Given


def make_rows(tokens: torch.Tensor, prompt: int, completion: int) -> list[tuple[list[int], list[int]]]:
    """One prompt and completions of it, cut from the text in order."""
    ids = tokens.tolist()
    starts = [prompt + n * completion for n in range(GENERATIONS)]
    return [(ids[:prompt], ids[start : start + completion]) for start in starts]


def word_tokenizer(vocab_size: int) -> PreTrainedTokenizerFast:
    """Turns ids into words for the reward and the trainer's log, which want text; reads nothing."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    inner = Tokenizer(WordLevel({f"w{n}": n for n in range(vocab_size)}, unk_token="w0"))
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="w0", eos_token="w0", unk_token="w0")


def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """Share of even tokens: rows of a group differ."""
    return [sum(token % 2 == 0 for token in ids) / len(ids) for ids in completion_ids]


def run(job: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Carries out one job: contender, steps (timed ones, after one that is not), tiny."""
    from datasets import Dataset

    model = load_weights(folder, torch.float32)
    tokens = torch.load(folder / "tokens.pt", weights_only=True)
    prompt, completion = SIZES["tiny" if job["tiny"] else "full"]
    steps = [
        make_rows(tokens, *WARM_UP),
        *(make_rows(tokens, prompt, completion) for _ in range(job["steps"])),
    ]
    config = GRPOConfig(
        output_dir=str(folder / "trl"), use_cpu=True, bf16=False, report_to="none", save_strategy="no",
        disable_tqdm=True, dataloader_pin_memory=False, logging_strategy="no", num_generations=GENERATIONS,
        max_completion_length=completion, max_steps=len(steps), learning_rate=1e-6, **BATCHES[job["contender"]],
    )  # fmt: skip
    meter = Meter()
    given = {
        "model": model, "reward_funcs": reward, "args": config, "callbacks": [meter],
        "train_dataset": Dataset.from_dict({"prompt": ["w1"] * len(steps)}),
        "processing_class": word_tokenizer(model.config.vocab_size),
    }  # fmt: skip
    if job["contender"] != "trl_ours":
        with_given_completions(GRPOTrainer, meter, steps)(**given).train()
        return {"runs": meter.runs[1:]}
    with open_store(device=BUDGET, host=BUDGET, disk=folder / "trl-pages", disk_capacity="16GiB") as store:
        trainer = with_given_completions(TierGRPOTrainer, meter, steps)(store=store, **given)
        trainer.train()
        assert trainer.step_report.captured_tokens == prompt
        return {"runs": meter.runs[1:], "report": trainer.step_report.as_dict()}
