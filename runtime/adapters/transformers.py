"""Transformers causal language models, through their attention interface."""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface

from tiercache.errors import ConfigError, ModelRefusedError
from tiercache.runtime.adapters.base import ModelAdapter, Router, without_peft

NAME = "tiercache"
_routers: weakref.WeakKeyDictionary[nn.Module, Router] = weakref.WeakKeyDictionary()


def attention_forward(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """The attention function that Transformers calls: [1, H, T, D] queries to [1, T, H, D] outputs."""
    del attention_mask  # positions along the tree say what is seen
    if dropout:
        raise ModelRefusedError(
            f"{type(module).__name__}: attention dropout", got=dropout, limit=0.0, remedy="set it to 0"
        )
    router = _routers.get(module)
    if router is None:
        raise ConfigError(
            f"{type(module).__name__} is not attached to a replay",
            remedy="use the model through BranchReplay",
        )
    out = router.attend(
        module,
        f"layer {getattr(module, 'layer_idx', '?')} ({type(module).__name__})",
        query,
        key,
        value,
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        window=sliding_window,
        softcap=softcap,
        sinks=s_aux,
    )
    return out.transpose(1, 2).contiguous(), None


AttentionInterface.register(NAME, attention_forward)


class _Given:
    """A base model's output of which only the last hidden states are set."""

    def __init__(self, hidden: torch.Tensor) -> None:
        self.last_hidden_state = hidden

    def __getitem__(self, index: int) -> torch.Tensor:
        return (self.last_hidden_state,)[index]

    def __getattr__(self, name: str) -> None:
        return None


class TransformersAdapter(ModelAdapter):
    """A `PreTrainedModel` with a language-model head, bare or inside a PEFT model.

    Args:
        model: any causal LM whose attention goes through Transformers' attention interface.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.router = Router()
        inner: Any = without_peft(model)
        self._causal = inner
        if inner.base_model is inner or inner.get_output_embeddings() is None:
            raise ModelRefusedError(
                f"{type(inner).__name__} has no language-model head",
                remedy="load it with AutoModelForCausalLM",
            )
        self._base: nn.Module = inner.base_model
        self._dummy_ids = torch.zeros(1, 1, dtype=torch.int64)
        for module in inner.modules():
            _routers[module] = self.router
        self._configs = list(
            {id(c): c for m in inner.modules() if (c := getattr(m, "config", None)) is not None}.values()
        )

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""
        return int(self._causal.get_input_embeddings().weight.shape[0])

    @property
    def device(self) -> torch.device:
        """Of the token embedding."""
        device: torch.device = self._causal.get_input_embeddings().weight.device
        return device

    @property
    def layers(self) -> list[nn.Module]:
        """The base model's decoder layers."""
        lists = [m for m in self._base.modules() if isinstance(m, nn.ModuleList)]
        stacks = [m for m in lists if any(hasattr(part, "layer_idx") for part in m.modules())]
        return list(max(stacks, key=lambda stack: len(stack))) if stacks else []

    def hidden(self, input_ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        """[1, T, E], after the final norm."""
        hidden: torch.Tensor = self._base(input_ids=input_ids, position_ids=position_ids, use_cache=False)[0]
        return hidden

    def project(self, hidden: torch.Tensor) -> torch.Tensor:
        """[n, V], by the causal LM's own forward over a stand-in for its base model."""
        given = _Given(hidden[None])
        self._base.forward = lambda *_, **__: given  # hides the class's method until it is deleted
        try:
            output = self._causal(input_ids=self._dummy_ids, use_cache=False)
        finally:
            del self._base.forward
        logits: torch.Tensor = output.logits[0]
        return logits

    def identity(self) -> bytes:
        """Configuration, module modes and which adapters are on."""
        state = [self._causal.config.to_json_string()]
        for module in self.model.modules():
            flags = (module.training, getattr(module, "disable_adapters", None))
            state.append(f"{flags}{getattr(module, '_active_adapter', '')}")
        return hashlib.blake2b("".join(state).encode()).digest()

    @contextmanager
    def attached(self, longest_row: int) -> Iterator[None]:
        """Switches every configuration of the model to the attention function of this file, for a step."""
        del longest_row
        before = [config._attn_implementation for config in self._configs]  # noqa: SLF001
        for config in self._configs:
            config._attn_implementation_internal = NAME  # noqa: SLF001
        try:
            yield
        finally:
            for config, name in zip(self._configs, before, strict=True):
                config._attn_implementation_internal = name  # noqa: SLF001
