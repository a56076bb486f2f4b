"""Models that are not Transformers': they call `prefix_attention` where they would call causal attention."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from tiercache.errors import ConfigError
from tiercache.runtime.adapters.base import ModelAdapter, Router

# The router of the step that is running. Process-wide and not thread-local: autograd recomputes layers on
# threads of its own, which must find the same step.
_running: list[Router] = []


def prefix_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    layer: int | str,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """Causal attention [B, H, T, Dv]; inside a replay, also over the pages of the node's ancestors.

    Args:
        q: [B, H, T, Dk], positions already encoded.
        k: [B, K, T, Dk]; H is a multiple of K.
        v: [B, K, T, Dv].
        layer: distinguishes the model's attention layers.
        scale: of the scores; 1 / sqrt(Dk) by default.
        window: sliding window in tokens, or None.
        softcap: soft cap of the scores, or None.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if _running:
        return _running[-1].attend(
            layer, f"layer {layer}", q, k, v, scale=scale, window=window, softcap=softcap
        )
    if window is None and softcap is None:
        return functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
        )
    group = q.shape[1] // k.shape[1]
    scores = q @ k.repeat_interleave(group, 1).transpose(-1, -2) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    at = torch.arange(q.shape[2], device=q.device)
    distance = at[:, None] - at[None, :]
    hidden = (distance < 0) | (distance >= window if window is not None else False)
    return scores.masked_fill(hidden, float("-inf")).softmax(-1) @ v.repeat_interleave(group, 1)


class PlainAdapter(ModelAdapter):
    """A model with two methods and, if it wants its layers under checkpointing, a list of them.

    Args:
        model: has `hidden(input_ids [1, T], position_ids [1, T]) -> [1, T, E]` with attention by
            `prefix_attention` and everything else per token, `project(hidden [n, E]) -> [n, V]`,
            `vocab_size`, and optionally `layers`.
    """

    identity_is_whole = False  # its forward may depend on attributes that nobody lists

    def __init__(self, model: nn.Module) -> None:
        for name in ("hidden", "project", "vocab_size"):
            if not hasattr(model, name):
                raise ConfigError(
                    f"model {type(model).__name__} has no `{name}`",
                    remedy="give it hidden(input_ids, position_ids), project(hidden) and vocab_size, "
                    "or pass a Transformers causal LM",
                )
        self.model = model
        self.router = Router()
        self._methods: Any = model

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""
        return int(self._methods.vocab_size)

    @property
    def device(self) -> torch.device:
        """Of the first parameter."""
        return next(self.model.parameters()).device

    @property
    def layers(self) -> list[nn.Module]:
        """The model's `layers`, or none."""
        return list(getattr(self.model, "layers", []))

    def hidden(self, input_ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        """[1, T, E] by the model's own method."""
        hidden: torch.Tensor = self._methods.hidden(input_ids, position_ids)
        return hidden

    def project(self, hidden: torch.Tensor) -> torch.Tensor:
        """[n, V] by the model's own method."""
        logits: torch.Tensor = self._methods.project(hidden)
        return logits

    def identity(self) -> bytes:
        """The class and the training mode of every module."""
        modes = "".join(str(int(m.training)) for m in self.model.modules())
        return hashlib.blake2b(f"{type(self.model).__qualname__}:{modes}".encode()).digest()

    @contextmanager
    def attached(self, longest_row: int) -> Iterator[None]:
        """Leads `prefix_attention` here."""
        del longest_row
        _running.append(self.router)
        try:
            yield
        finally:
            _running.pop()
