"""The seam to TRL: `model(..., labels=labels, fused_lm_head=True)` answered by a tree of rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch
from torch import nn
from trl.trainer.utils import FusedCausalLMOutput

from tiercache.errors import ConfigError

IGNORED = -100  # label of a token that is not scored
Autocast = Callable[[], AbstractContextManager[Any]]


class Scorer(Protocol):
    """What gives log-probabilities of a batch: `BranchReplay`, or `Reference` for frozen models."""

    statistics: dict[str, torch.Tensor]

    def logprobs(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None,
        scored: torch.Tensor,
        *,
        statistics: tuple[str, ...] = (),
    ) -> torch.Tensor:
        """[N, T] log-probabilities where scored, else 0."""


class TreeHead:
    """Puts itself before a model's forward: calls for fused log-probabilities run as a tree, others as before.

    TRL gives each model a forward that returns log-probabilities instead of logits when it is called with
    `fused_lm_head=True`. Both its trainers score through that call alone, policy and reference, so this is
    the one place to step in: wrappers around the model (DDP, PEFT, autocast) see an ordinary forward.

    Args:
        model: the causal LM that TRL has patched, inside any PEFT model. Its `forward` is replaced.
        choose: gives the scorer of a call; the same model can be policy and, adapters off, reference.
        statistics: what is wanted of each token's distribution beside its log-probability.
        autocast: the trainer's mixed precision; entered for each call.
    """

    def __init__(
        self,
        model: nn.Module,
        choose: Callable[[], Scorer],
        *,
        statistics: tuple[str, ...],
        autocast: Autocast,
    ) -> None:
        self._choose, self._statistics, self._autocast = choose, statistics, autocast
        self._forward = model.forward
        self._answers: Any = None
        model.forward = self._run

    @contextmanager
    def answering(self, answers: Any) -> Iterator[None]:
        """Lets calls without gradients be answered by `answers`, which has scored them already."""
        self._answers = answers
        try:
            yield
        finally:
            self._answers = None

    def _run(self, *args: Any, fused_lm_head: bool = False, **given: Any) -> Any:
        if not fused_lm_head:
            return self._forward(*args, **given)
        if self._answers is not None and not torch.is_grad_enabled():
            return self._answers(*args, fused_lm_head=True, **given)
        labels = given.pop("labels")
        ids = given.pop("input_ids", None)
        mask = given.pop("attention_mask", None)
        given.pop("use_cache", None)
        unknown = sorted(name for name, value in given.items() if value is not None)
        if args or ids is None or unknown:
            raise ConfigError(
                "inputs of a fused forward",
                got=", ".join(unknown) or "no input_ids",
                limit="input_ids, attention_mask and labels",
                remedy="images, virtual tokens and auxiliary losses are not supported",
            )
        scored = labels != IGNORED
        scored[:, 0] = False  # TRL shifts: nothing predicts the first token
        scorer = self._choose()
        with self._autocast():
            logps = scorer.logprobs(ids, mask, scored, statistics=self._statistics)
        return fused_output(logps[:, 1:], scored[:, 1:], scorer.statistics)


def fused_output(
    logps: torch.Tensor, scored: torch.Tensor, statistics: dict[str, torch.Tensor]
) -> FusedCausalLMOutput:
    """TRL's output object of shifted [N, T - 1] log-probabilities and of statistics [N, T]."""
    fields: dict[str, torch.Tensor] = {name: value[:, 1:] for name, value in statistics.items()}
    if "is_top1" in fields:
        fields["is_top1"] = fields["is_top1"].bool()
    loss = -logps.sum() / scored.sum().clamp(min=1)
    return FusedCausalLMOutput(loss=loss, log_probs=logps, label_mask=scored, **fields)
