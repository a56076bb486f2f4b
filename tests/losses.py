"""Objectives over log-probs [N, T] that are no sums over rows, as their papers and trainers write them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid


@dataclass(frozen=True)
class Batch:
    """Constants of an objective.

    Attributes:
        scored: [N, T] bool.
        old: [N, T] log-probs of the policy that sampled.
        reference: [N, T] log-probs of the reference policy.
        advantages: [N].
    """

    scored: Tensor
    old: Tensor
    reference: Tensor
    advantages: Tensor


def make_batch(logps: Tensor, scored: Tensor, seed: int = 3) -> Batch:
    """Old and reference policies near `logps`, so that ratios lie on both sides of the clip."""
    generator = torch.Generator().manual_seed(seed)

    def noise(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    base = logps.detach().double()
    old, reference = base + 0.3 * noise(*base.shape), base + 0.3 * noise(*base.shape)
    return Batch(scored, old.to(logps.dtype), reference.to(logps.dtype), noise(len(base)).to(logps.dtype))


def dpo(logps: Tensor, batch: Batch, beta: float = 0.3) -> Tensor:
    """Rafailov et al. 2023: even rows are chosen, odd rows rejected."""
    margin = ((logps - batch.reference) * batch.scored).sum(-1)
    pairs = len(margin) // 2 * 2
    return -logsigmoid(beta * (margin[0:pairs:2] - margin[1:pairs:2])).mean()


def ppo_clip(logps: Tensor, batch: Batch, clip: float = 0.2) -> Tensor:
    """Schulman et al. 2017: token ratios, mean over all tokens of the batch."""
    ratio = torch.exp(logps - batch.old)
    gain = torch.minimum(
        ratio * batch.advantages[:, None], ratio.clamp(1 - clip, 1 + clip) * batch.advantages[:, None]
    )
    return -(gain * batch.scored).sum() / batch.scored.sum()


def grpo(logps: Tensor, batch: Batch, clip: float = 0.2, beta: float = 0.04) -> Tensor:
    """Shao et al. 2024: advantages against the group, mean per row, penalty by the k3 estimate."""
    advantages = (batch.advantages - batch.advantages.mean()) / (batch.advantages.std() + 1e-4)
    ratio = torch.exp(logps - batch.old)
    gain = torch.minimum(ratio * advantages[:, None], ratio.clamp(1 - clip, 1 + clip) * advantages[:, None])
    away = batch.reference - logps
    per_token = gain - beta * (torch.exp(away) - away - 1)
    lengths = batch.scored.sum(-1).clamp(min=1)
    return -((per_token * batch.scored).sum(-1) / lengths).mean()


def gspo(logps: Tensor, batch: Batch, clip: float = 0.1) -> Tensor:
    """Zheng et al. 2025: one ratio a row, the geometric mean of its tokens' ratios."""
    lengths = batch.scored.sum(-1).clamp(min=1)
    ratio = torch.exp(((logps - batch.old) * batch.scored).sum(-1) / lengths)
    gain = torch.minimum(ratio * batch.advantages, ratio.clamp(1 - clip, 1 + clip) * batch.advantages)
    return -gain.mean()


OBJECTIVES: dict[str, Callable[[Tensor, Batch], Tensor]] = {
    "dpo": dpo,
    "ppo_clip": ppo_clip,
    "grpo": grpo,
    "gspo": gspo,
}
