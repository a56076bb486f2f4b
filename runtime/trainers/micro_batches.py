"""Micro-batches of one optimizer step, put together into one batch and handed out again slice by slice."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional
from trl.trainer.utils import FusedCausalLMOutput

from tiercache.errors import InputError
from tiercache.runtime.trainers.fused_head import IGNORED


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """What one micro-batch scores: ids, mask and labels, [n, T] each, as its loss will ask for them."""

    input_ids: torch.Tensor
    attention_mask: torch.Tensor
    labels: torch.Tensor


def joined(batches: Sequence[MicroBatch]) -> dict[str, torch.Tensor]:
    """One batch of all rows in order, padded on the right to the longest, as arguments of the model."""
    longest = max(batch.input_ids.shape[1] for batch in batches)

    def stack(name: str, value: int) -> torch.Tensor:
        parts = [getattr(batch, name) for batch in batches]
        return torch.cat([functional.pad(p, (0, longest - p.shape[1]), value=value) for p in parts])

    return {
        "input_ids": stack("input_ids", 0),
        "attention_mask": stack("attention_mask", 0),
        "labels": stack("labels", IGNORED),
    }


class SliceModel:
    """Stands for the model while the loss of each micro-batch is computed from the joint forward's output.

    Args:
        model: what answers calls that are no fused forward.
        batches: in the order of the joint batch.
        output: of the joint forward.
    """

    def __init__(self, model: Any, batches: Sequence[MicroBatch], output: FusedCausalLMOutput) -> None:
        self._model, self._output = model, output
        self._batches = list(batches)
        self._current, self._row = -1, 0

    def advance(self) -> None:
        """Goes to the next micro-batch."""
        if self._current >= 0:
            self._row += len(self._batches[self._current].input_ids)
        self._current += 1

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def __call__(self, *args: Any, fused_lm_head: bool = False, **given: Any) -> Any:
        """The micro-batch's share of the joint output; any other call goes to the model."""
        if not fused_lm_head:
            return self._model(*args, **given)
        batch = self._batches[self._current]
        for name in ("input_ids", "attention_mask", "labels"):
            value = given.get(name)
            if value is None or not torch.equal(value, getattr(batch, name)):
                raise InputError(
                    f"{name} of micro-batch {self._current}: the loss asks for others than were scored",
                    remedy="leave the batch as _prepare_inputs gave it, or override `_micro_batch` beside the loss",
                )
        rows, columns = len(batch.input_ids), batch.input_ids.shape[1] - 1
        shares = {
            name: value[self._row : self._row + rows, :columns]
            for name, value in self._output.items()
            if value is not None and value.ndim == 2
        }
        loss = -shares["log_probs"].sum() / shares["label_mask"].sum().clamp(min=1)
        return FusedCausalLMOutput(loss=loss, **shares)
