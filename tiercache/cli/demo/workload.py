"""The model and the group of rows that both sides train on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tiercache.cli.demo.settings import DemoSettings
from tiercache.errors import ConfigError

SEED = 7
NUM_BYTES = 256


@dataclass(frozen=True, kw_only=True)
class Branch:
    """One row of the group and what its loss needs.

    Attributes:
        tokens: [T] int64, prompt and tail.
        scored: [T] bool, true on the tail.
        advantage: how much better than the group this row was.
        num_scored: scored tokens of the whole group, the loss's denominator.
    """

    tokens: torch.Tensor
    scored: torch.Tensor
    advantage: float
    num_scored: int


def english_text() -> str:
    """English prose that every CPython ships: the topics of its help system."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics))


def load_model(settings: DemoSettings) -> Any:
    """The causal LM in fp32, in training mode; a small Llama with random weights unless one was named."""
    import transformers

    if settings.gguf is not None:
        path = Path(settings.gguf)
        unpacked = transformers.GgufConfig(dequantize=True)  # packed weights would not train
        model = transformers.AutoModelForCausalLM.from_pretrained(
            path.parent, gguf_file=path.name, quantization_config=unpacked, dtype=torch.float32
        )
    elif settings.model is not None:
        try:
            model = transformers.AutoModelForCausalLM.from_pretrained(settings.model, dtype=torch.float32)
        except (OSError, ValueError) as error:
            raise ConfigError(f"--model {settings.model}: {error}") from error
    else:
        torch.manual_seed(SEED)
        model = transformers.LlamaForCausalLM(small_llama(settings.row_tokens))
    longest = getattr(model.config, "max_position_embeddings", None)
    if longest is not None and longest < settings.row_tokens:
        raise ConfigError("prompt and tail tokens", got=settings.row_tokens, limit=f"{longest} of the model")
    return model.train()


def small_llama(max_tokens: int) -> Any:
    """Configuration of the embedded model: 4.4 million weights over bytes."""
    import transformers

    return transformers.LlamaConfig(
        vocab_size=NUM_BYTES,
        hidden_size=256,
        intermediate_size=672,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=max_tokens,
        bos_token_id=None,
        eos_token_id=None,
    )


def tokenizer(settings: DemoSettings) -> Callable[[str], list[int]]:
    """Text to token ids: bytes for the embedded model, the model's own otherwise."""
    if settings.model is None and settings.gguf is None:
        return lambda text: list(text.encode())
    import transformers

    if settings.gguf is not None:
        path = Path(settings.gguf)
        named = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    else:
        named = transformers.AutoTokenizer.from_pretrained(settings.model)
    return lambda text: named(text, add_special_tokens=False, verbose=False)["input_ids"]


def make_branches(settings: DemoSettings) -> list[Branch]:
    """One prompt with `branches` different real continuations and GRPO's advantages for made-up rewards."""
    num_wanted = settings.prompt_tokens + settings.branches * settings.tail_tokens
    # no tokenizer makes fewer tokens than one for 16 characters of prose; all of the text would take seconds
    text = english_text()[: 16 * num_wanted]
    ids = torch.tensor(tokenizer(settings)(text), dtype=torch.int64)
    if len(ids) < num_wanted:
        raise ConfigError("prompt and tail tokens", got=num_wanted, limit=f"{len(ids)} tokens of text")
    prompt, rest = ids[: settings.prompt_tokens], ids[settings.prompt_tokens :]
    tails = rest[: settings.branches * settings.tail_tokens].view(settings.branches, settings.tail_tokens)
    rewards = torch.rand(settings.branches, generator=torch.Generator().manual_seed(SEED))
    advantages = rewards - rewards.mean() if settings.branches > 1 else torch.ones(1)
    advantages = (
        advantages / advantages.std(correction=0).clamp_min(1e-4) if settings.branches > 1 else advantages
    )
    scored = torch.arange(settings.row_tokens) >= settings.prompt_tokens
    return [
        Branch(
            tokens=torch.cat([prompt, tail]),
            scored=scored,
            advantage=float(advantage),
            num_scored=settings.branches * settings.tail_tokens,
        )
        for tail, advantage in zip(tails, advantages, strict=True)
    ]


def grpo_loss(logps: torch.Tensor, branch: Branch) -> torch.Tensor:
    """This row's part of GRPO's clipped objective at the first step after sampling.

    Args:
        logps: [T] log-probabilities of the row's tokens, 0 where not scored.
        branch: the row.
    """
    logps = logps[branch.scored.to(logps.device)]
    ratio = torch.exp(logps - logps.detach())
    clipped = ratio.clamp(0.8, 1.2)
    return -torch.minimum(ratio * branch.advantage, clipped * branch.advantage).sum() / branch.num_scored
