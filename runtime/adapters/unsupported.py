"""What a Transformers configuration or module says about itself that trees of rows cannot carry."""

from __future__ import annotations

from typing import Any

from torch import nn

from tiercache.errors import ModelRefusedError
from tiercache.runtime.adapters.indexed import ranks_tokens, selects_keys


def refuse_unsupported(model: Any) -> None:
    """Raises ModelRefusedError for cross attention, shared keys and values and selections of pools of keys.

    Args:
        model: a Transformers model, not wrapped.
    """
    for name, module in model.named_modules():
        reason = _reason(module)
        if reason is not None:
            raise ModelRefusedError(
                f"{name} ({type(module).__name__}): {reason}", remedy="use a decoder-only model without it"
            )
    config = model.config
    if getattr(config, "is_encoder_decoder", False):
        raise ModelRefusedError(
            f"{type(model).__name__}: cross attention of an encoder-decoder",
            remedy="use a decoder-only model",
        )
    text = config.get_text_config()
    if getattr(text, "num_kv_shared_layers", 0):
        raise ModelRefusedError(
            f"the last {text.num_kv_shared_layers} layers of {type(model).__name__}: shared KV, they read the keys "
            "and values of earlier layers",
            remedy="use a model in which every layer has its own keys and values",
        )


def _reason(module: nn.Module) -> str | None:
    if getattr(module, "is_cross_attention", False):
        return "cross attention"
    if getattr(module, "is_kv_shared_layer", False):
        return "shared KV, it reads the keys and values of an earlier layer"
    if selects_keys(module) and not ranks_tokens(module):
        return (
            "sparse selection of pools of keys, which begin in one page and end in the next, so that no page can be "
            "ranked alone"
        )
    return None
