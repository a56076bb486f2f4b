"""Activation offload for Transformers' Trainer, as a callback."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn
from transformers import TrainerCallback

from tiercache.runtime.offloading import offload


class TierCallback(TrainerCallback):
    """Lets a store keep what autograd saves in the model's forward: `Trainer(..., callbacks=[TierCallback(store)])`.

    Any model, any loss that the forward computes. Gradients are bit for bit those without the callback.
    Evaluation is left alone. The model's `forward` is wrapped from the beginning to the end of `train()`.

    Args:
        store: a `tiercache.TierStore`; stays the caller's to close, after `train()` has returned.
        options: of `tiercache.runtime.offload`.
    """

    def __init__(self, store: Any, **options: Any) -> None:
        self._offload = offload(store, **options)
        self._before: tuple[nn.Module, Any] | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Wraps the model's forward."""
        model = kwargs["model"]
        self._restore()
        self._before = (model, model.__dict__.get("forward"))
        forward = model.forward

        @functools.wraps(forward)
        def run(*inputs: Any, **named: Any) -> Any:
            if not (model.training and torch.is_grad_enabled()):
                return forward(*inputs, **named)
            with self._offload:
                return forward(*inputs, **named)

        model.forward = run

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Gives the model its own forward back."""
        self._restore()

    def _restore(self) -> None:
        if self._before is None:
            return
        model, before = self._before
        self._before = None
        if before is None:
            del model.forward
        else:
            model.forward = before
