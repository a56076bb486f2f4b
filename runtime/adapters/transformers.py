"""Transformers causal language models, through their attention interface."""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, PreTrainedModel

from tiercache.errors import ConfigError, ModelRefusedError
from tiercache.runtime.adapters.base import ModelAdapter, Router, without_peft
from tiercache.runtime.adapters.experts import Routers, find_routers
from tiercache.runtime.adapters.indexed import indexers, indexers_led
from tiercache.runtime.adapters.latent import latent_layers, latents_led
from tiercache.runtime.adapters.recurrent import SHORTEST_NODE, state_layers, states_led
from tiercache.runtime.adapters.rotary import fixed_frequencies, moving_tables
from tiercache.runtime.adapters.twin import LIMIT, build_twin, named_lengths
from tiercache.runtime.adapters.unsupported import refuse_unsupported
from tiercache.runtime.balance import routers_watched
from tiercache.runtime.forwards import replaced_forwards
from tiercache.runtime.selection import Selection

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
    indices: Selection | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """The attention function that Transformers calls: [1, H, T, D] queries to [1, T, H, D] outputs."""
    del attention_mask  # positions along the tree say what is seen
    if dropout:
        raise ModelRefusedError(
            f"{type(module).__name__}: attention dropout", got=dropout, limit=0.0, remedy="set it to 0"
        )
    if torch.is_autocast_enabled(query.device.type):  # as torch's own attention does
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
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
        selection=indices,
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


def _base_model(causal: Any) -> nn.Module:
    """The part of a causal LM that gives last hidden states."""
    base: nn.Module = causal.base_model
    if base is causal:  # classes whose base_model_prefix names what only their multimodal kin has
        base = next((m for m in causal.children() if isinstance(m, PreTrainedModel)), causal)
    if base is causal or causal.get_output_embeddings() is None:
        raise ModelRefusedError(
            f"{type(causal).__name__} has no language-model head",
            remedy="load it with AutoModelForCausalLM",
        )
    return base


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
        self._base: nn.Module = _base_model(inner)
        self._dummy_ids = torch.zeros(1, 1, dtype=torch.int64)
        self._limits: dict[str, int] = {}
        self._state_layers = state_layers(inner)
        self._latent_layers = latent_layers(inner)
        self._indexers = indexers(inner)
        # layers hand their indexers a slice of the mask, which nothing reads
        self._mask = {"attention_mask": torch.zeros(1, 1, 1, 1)} if self._indexers else {}
        self._routers = find_routers(inner)
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
    def routers(self) -> Routers | None:
        """Of its experts, where the class computes a load-balancing loss."""
        return self._routers

    @property
    def wants_auxiliary_loss(self) -> bool:
        """By `output_router_logits`."""
        return bool(getattr(self._causal.config.get_text_config(), "output_router_logits", False))

    @property
    def shortest_node(self) -> int:
        """Two tokens where layers have states."""
        return SHORTEST_NODE if self._state_layers else 1

    @property
    def layers(self) -> list[nn.Module]:
        """The base model's decoder layers."""
        lists: list[nn.ModuleList] = [m for m in self._base.modules() if isinstance(m, nn.ModuleList)]
        stacks = [m for m in lists if any(hasattr(part, "layer_idx") for part in m.modules())]
        largest = max(stacks, key=len, default=nn.ModuleList())
        return list(largest)

    def hidden(self, input_ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        """[1, T, E], after the final norm."""
        hidden: torch.Tensor = self._base(
            input_ids=input_ids, position_ids=position_ids, use_cache=False, **self._mask
        )[0]
        return hidden

    def project(self, hidden: torch.Tensor) -> torch.Tensor:
        """[n, V], by the causal LM's own forward over a stand-in for its base model."""
        given = _Given(hidden[None])
        taken: list[_Given] = []

        def give(*_: Any, **__: Any) -> _Given:
            taken.append(given)
            return given

        try:
            with replaced_forwards([(self._base, give)]):
                output = self._causal(input_ids=self._dummy_ids, use_cache=False)
        except ConfigError as error:
            if taken:
                raise
            raise self._no_seam() from error
        if not taken:
            raise self._no_seam()
        logits: torch.Tensor = output.logits[0]
        return logits

    def _no_seam(self) -> ModelRefusedError:
        return ModelRefusedError(
            f"{type(self._causal).__name__} does not call its base model {type(self._base).__name__}, so its head "
            "cannot be run on hidden states",
            remedy="use a causal LM that calls its base model as a whole",
        )

    def dense_logits(self, input_ids: torch.Tensor) -> torch.Tensor:
        """[T, V], by the model's own forward and its own attention."""
        logits: torch.Tensor = self.model(input_ids=input_ids, use_cache=False).logits[0]
        return logits

    def refuse_unsupported(self) -> None:
        """Refuses cross attention, shared keys and values, and auxiliary losses of experts."""
        refuse_unsupported(self._causal)

    def twin(self) -> TransformersAdapter:
        """The adapter of a tiny model of the same class."""
        twin = TransformersAdapter(build_twin(self._causal))
        twin._limits = named_lengths(self._causal.config)
        return twin

    @property
    def described(self) -> str:
        """The class, and the limits that were shrunk for the proof."""
        shrunk = "".join(f", {name} {LIMIT} instead of {value}" for name, value in self._limits.items())
        return type(self._causal).__name__ + shrunk

    def identity_of_length(self, longest_row: int) -> bytes:
        """The row that moving rotary tables are fixed for."""
        return str(longest_row).encode() if moving_tables(self._causal) else b""

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
        before = [config._attn_implementation for config in self._configs]  # noqa: SLF001
        bound = {module: _routers.get(module) for module in self._causal.modules()}
        for config in self._configs:
            config._attn_implementation_internal = NAME  # noqa: SLF001
        _routers.update(dict.fromkeys(bound, self.router))
        try:
            with (
                fixed_frequencies(self._causal, longest_row),
                states_led(self._state_layers, self.router),
                latents_led(self._latent_layers, self.router),
                indexers_led(self._indexers, self.router),
                routers_watched(self._routers, self.router),
            ):
                yield
        finally:
            for config, name in zip(self._configs, before, strict=True):
                config._attn_implementation_internal = name  # noqa: SLF001
            for module, router in bound.items():
                if router is None:
                    del _routers[module]
                else:
                    _routers[module] = router
