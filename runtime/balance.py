"""The load-balancing loss of experts over a tree: each token counts once for every row that holds it.

Transformers' loss is E * sum over experts of f_e * p_e: f_e the share of assignments, which has no gradient, p_e the
mean probability, over all tokens and layers. f needs every token of the batch before the first backward, so it is
gathered in the walk that captures and scores; the walk of gradients adds each token's part where its router's
scores are used.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from tiercache.runtime.frame import Frame
from tiercache.runtime.rows import TokenRow
from tiercache.runtime.tree import Tree


@dataclass(slots=True)
class Balance:
    """One step's load-balancing loss.

    Attributes:
        top_k: experts of a token.
        weights: [n] of each node's tokens, how many rows hold them.
        counts: [E] weighted assignments so far, all layers together; empty before the first.
        probabilities: [E] weighted sums of probabilities.
        num_tokens: weighted tokens, each layer's counted.
        gradient: dL / d(this loss), set before the walk of gradients.
    """

    top_k: int
    weights: list[torch.Tensor]
    counts: torch.Tensor = field(default_factory=lambda: torch.zeros(0))
    probabilities: torch.Tensor = field(default_factory=lambda: torch.zeros(0))
    num_tokens: float = 0.0
    gradient: float = 0.0

    def of(self, frame: Frame) -> torch.Tensor:
        """[T] weights of a visit's packed tokens."""
        return torch.cat([self.weights[piece.node] for piece in frame.pieces]).to(frame.device)

    def add(self, logits: torch.Tensor, weights: torch.Tensor) -> None:
        """Counts one router's logits [T, E]."""
        probabilities = torch.softmax(logits.detach(), -1)
        chosen = torch.topk(probabilities, self.top_k, -1).indices
        if not len(self.counts):
            self.counts = torch.zeros(logits.shape[-1], dtype=torch.float32, device=logits.device)
            self.probabilities = torch.zeros_like(self.counts)
        self.counts.index_add_(0, chosen.reshape(-1), weights.repeat_interleave(self.top_k))
        self.probabilities += (probabilities.float() * weights[:, None]).sum(0)
        self.num_tokens += float(weights.sum())

    @property
    def loss(self) -> torch.Tensor:
        """Scalar in fp32, without a graph."""
        shares = self.counts / self.num_tokens
        return len(shares) * (shares * self.probabilities / self.num_tokens).sum()

    def gradient_of(self, logits: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """[T, E] of the logits of one router."""
        scale = self.gradient * len(self.counts) / self.num_tokens**2
        owed = scale * weights[:, None] * self.counts
        probabilities = torch.softmax(logits, -1).float()
        return (probabilities * (owed - (probabilities * owed).sum(-1, keepdim=True))).to(logits.dtype)


def token_weights(tree: Tree, rows: Sequence[TokenRow]) -> list[torch.Tensor]:
    """For each node, [n] how many rows hold each of its tokens."""
    weights = [torch.zeros(len(node.tokens)) for node in tree.nodes]
    for row, leaf in zip(rows, tree.leaf_of_row, strict=True):
        for index in tree.path(leaf):
            weights[index][: max(0, len(row.tokens) - tree.nodes[index].start)] += 1
    return weights


class _Relay(torch.autograd.Function):
    """Passes a router's scores on; its backward adds what the balance owes the logits."""

    @staticmethod
    def forward(ctx: Any, scores: torch.Tensor, logits: torch.Tensor, frame: Frame) -> torch.Tensor:
        ctx.save_for_backward(logits)
        ctx.frame = frame
        return scores.view_as(scores)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (logits,) = ctx.saved_tensors
        balance: Balance = ctx.frame.balance
        return grad, balance.gradient_of(logits, balance.of(ctx.frame)), None


@contextmanager
def routers_watched(routers: Any, visit: Any) -> Iterator[None]:
    """Counts and relays what routers give, in visits of a step that wants their loss.

    Args:
        routers: a model's, or None. Scores are the first floating tensor beside the logits.
        visit: has `frame`, the visit that is running or None.
    """
    modules = [] if routers is None else routers.modules
    handles = [module.register_forward_hook(partial(_watch, routers.index, visit)) for module in modules]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _watch(index: int, visit: Any, _: nn.Module, args: Any, output: Any) -> Any:
    del args
    frame: Frame | None = visit.frame
    if frame is None or frame.balance is None:
        return output
    logits = output[index]
    if frame.phase in ("capture", "score"):
        frame.balance.add(logits, frame.balance.of(frame))
    at = next(i for i, t in enumerate(output) if i != index and t.is_floating_point())
    relayed = _Relay.apply(output[at], logits, frame)  # type: ignore[no-untyped-call]
    return (*output[:at], relayed, *output[at + 1 :])
