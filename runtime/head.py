"""Log-probabilities from last hidden states, in chunks of tokens, so that a node's logits are never held."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from tiercache.errors import ConfigError
from tiercache.runtime.kernels import accumulator_dtype

Head = Callable[[torch.Tensor], torch.Tensor]
STATISTICS = ("entropy", "mean_logits", "is_top1", "log_sum_sq_probs")
_COPIES = 4  # of a chunk alive at once: logits and their gradient, as projected and in the accumulator dtype

# CPU libraries multiply rows by fours and sum what is left over one term after the other: up to ten times the rounding.
_ROWS = 4


def check_statistics(names: tuple[str, ...]) -> tuple[str, ...]:
    """The same names, or ConfigError."""
    for name in names:
        if name not in STATISTICS:
            raise ConfigError("statistics", got=repr(name), limit=" | ".join(STATISTICS))
    return names


@dataclass(frozen=True, slots=True)
class ChunkedHead:
    """The vocabulary projection of a model, a bounded number of tokens at a time.

    Attributes:
        project: [n, E] hidden states -> [n, V] logits, with the model's own scaling and capping.
        vocab_size: V.
        budget_bytes: bound of the logits of one chunk.
        temperature: logits are divided by it.
    """

    project: Head
    vocab_size: int
    budget_bytes: int
    temperature: float = 1.0

    def chunk_tokens(self, dtype: torch.dtype) -> int:
        """Tokens whose logits fit the budget."""
        return max(1, self.budget_bytes // (_COPIES * self.vocab_size * accumulator_dtype(dtype).itemsize))

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = self.project(hidden)
        logits = logits.to(accumulator_dtype(logits.dtype))
        return logits if self.temperature == 1.0 else logits / self.temperature

    def values(
        self, hidden: torch.Tensor, targets: torch.Tensor, statistics: tuple[str, ...] = ()
    ) -> torch.Tensor:
        """[n, 1 + S]: log-probabilities of `targets` given hidden states [n, E], then S of STATISTICS of their
        distributions; without a graph.
        """
        size = self.chunk_tokens(hidden.dtype)
        parts = []
        with torch.no_grad():
            for h, t in zip(hidden.split(size), targets.split(size), strict=True):
                logits = self._logits(h)
                columns = [_picked(logits, t), *(_statistic(name, logits, t) for name in statistics)]
                parts.append(torch.stack(columns, -1))
        if not parts:
            return hidden.new_zeros(0, 1 + len(statistics), dtype=accumulator_dtype(hidden.dtype))
        return torch.cat(parts)

    def gradient(self, hidden: torch.Tensor, targets: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        """dL/dhidden [n, E] for dL/dlogp [n]; the projection's own gradients go to its parameters."""
        size = self.chunk_tokens(hidden.dtype)
        result = torch.zeros_like(hidden)
        for begin in range(0, len(targets), size):
            part = slice(begin, min(begin + size, len(targets)))
            leaf = _extended(hidden[part].detach()).requires_grad_()
            with torch.enable_grad():
                logits = self._logits(leaf)
            owed = _logits_gradient(logits.detach(), _extended(targets[part]), _extended(grad[part]))
            logits.backward(owed)
            if leaf.grad is not None:
                result[part] = leaf.grad[: part.stop - begin]
        return result


def _extended(x: torch.Tensor) -> torch.Tensor:
    """Zeros after the last row, up to whole fours; as their gradients are zero too they change nothing."""
    missing = -len(x) % _ROWS
    return torch.cat([x, x.new_zeros(missing, *x.shape[1:])]) if missing else x


def _picked(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return logits.log_softmax(-1).gather(-1, targets[:, None])[:, 0]


def _logits_gradient(logits: torch.Tensor, targets: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    """dL/dlogits [n, V] for dL/dlogp [n] of the targets.

    The probabilities come from log_softmax, which subtracts the largest logit first: exp(logit - logsumexp) is off by
    a rounding of the logits themselves, and that is much of `1 - p` where the model is sure of the target.
    """
    grad = grad.to(logits.dtype)[:, None]
    return logits.log_softmax(-1).exp_().mul_(-grad).scatter_add_(-1, targets[:, None], grad)


def _statistic(name: str, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """[n] of one of STATISTICS, in the dtype of the logits [n, V]."""
    if name == "mean_logits":
        return logits.mean(-1)
    if name == "is_top1":
        return (logits.argmax(-1) == targets).to(logits.dtype)
    logps = logits.log_softmax(-1)
    if name == "entropy":
        return -(logps.exp() * logps).sum(-1)
    return (2 * logps).logsumexp(-1)
