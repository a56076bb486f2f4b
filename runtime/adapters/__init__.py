"""Adapters: how a model's layers reach the attention over pages."""

from __future__ import annotations

from torch import nn

from tiercache.runtime.adapters.base import ModelAdapter, Router, without_peft
from tiercache.runtime.adapters.plain import PlainAdapter, prefix_attention

__all__ = ["ModelAdapter", "PlainAdapter", "Router", "create_adapter", "prefix_attention"]


def create_adapter(model: nn.Module) -> ModelAdapter:
    """The adapter that fits: Transformers (also under PEFT) for models with a configuration, else plain."""
    inner = without_peft(model)
    if hasattr(inner, "base_model_prefix") and hasattr(inner, "config"):
        from tiercache.runtime.adapters.transformers import TransformersAdapter  # only where it is used

        return TransformersAdapter(model)
    return PlainAdapter(model)
