"""The two training steps that the offload benchmark runs: a small GPT, and SmolLM2-135M."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from replay_workload import load_weights
from torch import nn
from torch.utils.checkpoint import checkpoint

MODELS = ("gpt", "smollm2")
IGNORED = -100  # label of a token that predicts nothing


class Block(nn.Module):
    """One layer of the small GPT, with dropout wherever the first GPTs had it."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.drop1, self.drop2 = nn.Dropout(0.1), nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """X [B, T, C] -> [B, T, C]."""
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.qkv(self.norm1(x)).chunk(3, dim=-1)
        )
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.drop1(self.out(mixed.transpose(1, 2).flatten(2)))
        return x + self.drop2(self.down(nn.functional.gelu(self.up(self.norm2(x)))))


class SmallGPT(nn.Module):
    """A GPT of a few million parameters; its head shares the embedding."""

    def __init__(self, *, width: int, layers: int, vocab: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.drop = nn.Dropout(0.1)
        self.blocks = nn.ModuleList(Block(width, width // 64) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.checkpointed = False

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Tokens [B, T] -> logits [B, T, V]."""
        x = self.drop(self.embed(tokens))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        return nn.functional.linear(self.norm(x), self.embed.weight)


def make_step(
    name: str, folder: Path, *, tiny: bool, checkpointed: bool
) -> tuple[nn.Module, Callable[[], torch.Tensor]]:
    """A model with its gradients in memory, and the function that makes its loss."""
    torch.manual_seed(1)
    if name == "gpt":
        width, layers, vocab, shape = (64, 2, 512, (2, 64)) if tiny else (384, 8, 8192, (4, 512))
        model: Any = SmallGPT(width=width, layers=layers, vocab=vocab)
        model.checkpointed = checkpointed
        tokens = torch.randint(vocab, shape)
    else:
        model = load_weights(folder, torch.float32)
        if checkpointed:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        rows, length = (2, 64) if tiny else (2, 512)
        tokens = torch.load(folder / "tokens.pt", weights_only=True)[: rows * length].view(rows, length)
    # Labels are shifted, not logits: a slice of those would be copied whole.
    labels = nn.functional.pad(tokens[:, 1:], (0, 1), value=IGNORED).flatten()
    model.train()
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter).fill_(0)

    def loss() -> torch.Tensor:
        torch.manual_seed(2)
        logits = model(tokens)
        logits = logits if isinstance(logits, torch.Tensor) else logits.logits
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels, ignore_index=IGNORED)

    return model, loss


def digest_gradients(model: nn.Module) -> str:
    """One digest of every bit of every gradient."""
    digest = hashlib.blake2b(digest_size=16)
    for parameter in model.parameters():
        assert parameter.grad is not None
        digest.update(parameter.grad.contiguous().view(torch.uint8).numpy())
    return digest.hexdigest()


def zero_gradients(model: nn.Module) -> None:
    """Zeroes gradients in place: their memory is the model's, not the step's."""
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad.zero_()
