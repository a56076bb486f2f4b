"""Log-probabilities from last hidden states, in chunks of tokens, so that a node's logits are never held."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from tiercache.runtime.kernels import accumulator_dtype

Head = Callable[[torch.Tensor], torch.Tensor]
_COPIES = 3  # of a chunk's logits alive at once: as projected, in the accumulator dtype, their gradient


@dataclass(frozen=True, slots=True)
class ChunkedHead:
    """The vocabulary projection of a model, a bounded number of tokens at a time.

    Attributes:
        project: [n, E] hidden states -> [n, V] logits, with the model's own scaling and capping.
        vocab_size: V.
        budget_bytes: bound of the logits of one chunk.
    """

    project: Head
    vocab_size: int
    budget_bytes: int

    def chunk_tokens(self, dtype: torch.dtype) -> int:
        """Tokens whose logits fit the budget."""
        return max(1, self.budget_bytes // (_COPIES * self.vocab_size * accumulator_dtype(dtype).itemsize))

    def _logps(self, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        logits = self.project(hidden)
        logits = logits.to(accumulator_dtype(logits.dtype))
        return logits.gather(-1, targets[:, None])[:, 0] - logits.logsumexp(-1)

    def values(self, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """[n] log-probabilities of `targets` given hidden states [n, E], without a graph."""
        size = self.chunk_tokens(hidden.dtype)
        with torch.no_grad():
            parts = [self._logps(h, t) for h, t in zip(hidden.split(size), targets.split(size), strict=True)]
        return torch.cat(parts) if parts else hidden.new_zeros(0, dtype=accumulator_dtype(hidden.dtype))

    def gradient(self, hidden: torch.Tensor, targets: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        """dL/dhidden [n, E] for dL/dlogp [n]; the projection's own gradients go to its parameters."""
        size = self.chunk_tokens(hidden.dtype)
        result = torch.zeros_like(hidden)
        for begin in range(0, len(targets), size):
            part = slice(begin, begin + size)
            leaf = hidden[part].detach().requires_grad_()
            with torch.enable_grad():
                logps = self._logps(leaf, targets[part])
            logps.backward(grad[part].to(logps.dtype))
            if leaf.grad is not None:
                result[part] = leaf.grad
        return result
