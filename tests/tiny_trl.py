"""Tiny TRL runs: a word-level tokenizer and a Llama of two layers made in memory, data from a fixed seed."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import model_zoo
import pytest
import torch
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast, TrainerCallback
from trl import DPOConfig, GRPOConfig, GRPOTrainer

# the libraries' own, about their own names
WARNINGS = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
WORDS = 40
STEPS = 20
PROMPT_TOKENS = 24
PROMPTS_SHARED = {"min_shared_tokens": 16}


def tokenizer() -> PreTrainedTokenizerFast:
    """Words w0..w39 and three special ones."""
    names = ["<pad>", "<eos>", "<unk>", *(f"w{i}" for i in range(WORDS))]
    inner = Tokenizer(WordLevel({name: i for i, name in enumerate(names)}, unk_token="<unk>"))
    inner.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )


def save_model(folder: Path, **fields: Any) -> Path:
    """Saves a tiny Llama, so that trainers can load a reference of it."""
    model = model_zoo.build("llama", dtype=torch.float32, vocab_size=WORDS + 3, eos_token_id=1, **fields)
    model.save_pretrained(folder)
    return folder


def load_model(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")


def _words(source: random.Random, count: int) -> str:
    return " ".join(f"w{source.randrange(WORDS)}" for _ in range(count))


def prompts(count: int = 8, length: int = PROMPT_TOKENS) -> Dataset:
    source = random.Random(0)
    return Dataset.from_dict({"prompt": [_words(source, length) for _ in range(count)]})


def pairs(count: int = 16, length: int = PROMPT_TOKENS) -> Dataset:
    """Every prompt twice, with other completions."""
    source = random.Random(1)
    texts = [_words(source, length) for _ in range(count // 2)] * 2
    return Dataset.from_dict(
        {
            "prompt": texts,
            "chosen": [" " + _words(source, source.randrange(3, 9)) for _ in texts],
            "rejected": [" " + _words(source, source.randrange(3, 9)) for _ in texts],
        }
    )


def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """Share of even tokens: every group has winners and losers."""
    return [sum(token % 2 == 0 for token in ids) / max(1, len(ids)) for ids in completion_ids]


def _common(folder: Path, **fields: Any) -> dict[str, Any]:
    return {
        "output_dir": str(folder / "run"),
        "use_cpu": True,
        "bf16": False,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
        "logging_steps": 1,
        "learning_rate": 1e-3,
        "lr_scheduler_type": "constant",
        "max_steps": STEPS,
        "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": 8,
        "activation_checkpointing": False,
        "dataloader_pin_memory": False,
        **fields,
    }


def grpo_config(folder: Path, **fields: Any) -> GRPOConfig:
    given = {"num_generations": 4, "max_completion_length": 8, "beta": 0.04, **fields}
    return GRPOConfig(**_common(folder, **given))


def dpo_config(folder: Path, **fields: Any) -> DPOConfig:
    return DPOConfig(**_common(folder, **{"gradient_accumulation_steps": 4, "max_length": 64, **fields}))


def build(
    trainer: Any,
    folder: Path,
    store: Any = None,
    *,
    model: Any = None,
    watch: Any = None,
    given: Any = None,
    **config: Any,
) -> Any:
    """A trainer of TRL's, or over `store` one of ours, for the tiny model and data. `given`: further arguments."""
    over_store = {} if store is None else {"store": store, "replay_options": PROMPTS_SHARED}
    grpo = issubclass(trainer, GRPOTrainer)
    return trainer(
        model=model or load_model(folder),
        args=(grpo_config if grpo else dpo_config)(folder, **config),
        train_dataset=prompts() if grpo else pairs(),
        eval_dataset=prompts(2) if grpo else pairs(4),
        processing_class=tokenizer(),
        callbacks=[watch] if watch else None,
        **({"reward_funcs": reward} if grpo else {}),
        **{**over_store, **(given or {})},
    )


def train(
    trainer: Any, folder: Path, store: Any = None, *, resume: Path | None = None, **options: Any
) -> tuple[Any, Watch]:
    """Builds and trains; the trainer and the parameters' way."""
    watch = Watch()
    torch.manual_seed(0)
    built = build(trainer, folder, store, watch=watch, **options)
    for parameter in built.model.parameters():
        if parameter.requires_grad:  # TRL rounds the adapters of a quantised model to bf16: noise here
            parameter.data = parameter.data.float()
    built.train(resume_from_checkpoint=None if resume is None else str(resume))
    return built, watch


class Watch(TrainerCallback):
    """Keeps the trainable parameters as one vector, before training and after every step."""

    def __init__(self) -> None:
        self.vectors: list[Tensor] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, model: nn.Module, **_: Any) -> None:
        self.vectors.append(_vector(model))

    def on_step_end(self, args: Any, state: Any, control: Any, model: nn.Module, **_: Any) -> None:
        self.vectors.append(_vector(model))

    def distance(self, other: Watch) -> float:
        """Largest over the steps run here: distance from the other's parameters by the distance that it moved."""
        assert 1 < len(self.vectors) <= len(other.vectors)
        start = other.vectors[0]
        assert torch.equal(start, self.vectors[0])
        return max(
            float((mine - theirs).norm() / (theirs - start).norm())
            for mine, theirs in zip(self.vectors[1:], other.vectors[1:], strict=False)
        )


def logged(trainer: Any, name: str) -> list[float]:
    """A metric of every step."""
    return [float(entry[name]) for entry in trainer.state.log_history if name in entry]


def _vector(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().double().reshape(-1) for p in model.parameters() if p.requires_grad])
