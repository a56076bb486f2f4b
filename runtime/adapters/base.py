"""The contract of an adapter: how a model's layers reach the attention over pages."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from tiercache.errors import ConfigError
from tiercache.runtime.adapters.experts import Routers
from tiercache.runtime.attention import page_attention
from tiercache.runtime.frame import Frame, LayerSpec
from tiercache.runtime.latents import Latents
from tiercache.runtime.selection import Selection


@dataclass(slots=True)
class Router:
    """Leads each attention layer's call to the visit that is running.

    Attributes:
        frame: the visit, or None between visits.
        specs: layers in the order of their first call.
        latents: of the layers that are between their projection and their attention.
    """

    frame: Frame | None = None
    specs: dict[object, LayerSpec] = field(default_factory=dict)
    latents: dict[object, Latents] = field(default_factory=dict)

    def attend(
        self,
        layer: object,
        name: str,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
        selection: Selection | None = None,
    ) -> torch.Tensor:
        """[1, H, T, Dv]; `layer` identifies the layer, shapes as in `page_attention`."""
        if self.frame is None:
            raise ConfigError(
                f"attention of {name} was called outside a visit",
                remedy="call the model through BranchReplay, or switch its attention back",
            )
        spec, latents = self.specs.get(layer), self.latents.pop(layer, None)
        if spec is None:
            key_page, value_page = (k.shape[1], k.shape[3]), (v.shape[1], v.shape[3])
            widths = None if latents is None else latents.widths
            spec = LayerSpec(len(self.specs), name, window, key_page, value_page, k.dtype, widths)
            self.specs[layer] = spec
        return page_attention(
            q, k, v, frame=self.frame, layer=spec, scale=scale, softcap=softcap, sinks=sinks,
            latents=latents, selection=selection,
        )  # fmt: skip

    @contextmanager
    def running(self, frame: Frame) -> Iterator[None]:
        """Makes `frame` the visit that is running."""
        before, self.frame = self.frame, frame
        try:
            yield
        finally:
            self.frame = before
            self.latents.clear()


def without_peft(model: nn.Module) -> nn.Module:
    """The model inside a PEFT model, with its adapter layers in place; any other model itself."""
    inner: Any = model
    base: nn.Module = inner.get_base_model() if hasattr(inner, "get_base_model") else model
    return base


class ModelAdapter(ABC):
    """What BranchReplay needs of a model.

    Attributes:
        model: the user's, never copied.
        router: where its attention layers' calls go.
    """

    model: nn.Module
    router: Router
    identity_is_whole: bool = True
    """Whether `identity` and the tensors are all that a forward depends on, as far as the model says."""

    @property
    @abstractmethod
    def vocab_size(self) -> int:
        """Number of token ids."""

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """Where token ids go."""

    @property
    def routers(self) -> Routers | None:
        """Of the experts whose load-balancing loss the model computes; None without one."""
        return None

    @property
    def wants_auxiliary_loss(self) -> bool:
        """Whether the model's configuration switches that loss on."""
        return False

    @property
    @abstractmethod
    def layers(self) -> list[nn.Module]:
        """Layers that capture puts under checkpointing, in any order."""

    @property
    def shortest_node(self) -> int:
        """Fewest tokens of a captured node that has a parent."""
        return 1

    @abstractmethod
    def hidden(self, input_ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        """[1, T, E] last hidden states, as the vocabulary projection takes them, of packed ids [1, T]."""

    @abstractmethod
    def project(self, hidden: torch.Tensor) -> torch.Tensor:
        """[n, V] logits of hidden states [n, E], with the model's own scaling and capping."""

    @abstractmethod
    def identity(self) -> bytes:
        """What, beside the parameters, the forward depends on: configuration, adapters, modes."""

    def identity_of_length(self, longest_row: int) -> bytes:
        """What of a forward depends on the step's longest row; nothing in most models."""
        del longest_row
        return b""

    def dense_logits(self, input_ids: torch.Tensor) -> torch.Tensor:
        """[T, V] logits of one whole row [1, T], run outside a step as its user runs the model."""
        positions = torch.arange(input_ids.shape[1], device=input_ids.device)[None]
        return self.project(self.hidden(input_ids, positions)[0])

    def refuse_unsupported(self) -> None:
        """Raises ModelRefusedError, naming the layer, for what is known to be wrong without running the model."""
        return

    def twin(self) -> ModelAdapter | None:
        """The adapter of a tiny model of the same class whose limits on length are shrunk; None without one."""
        return None

    @property
    def described(self) -> str:
        """What a proof of this model says about it."""
        return type(self.model).__name__

    @contextmanager
    def attached(self, longest_row: int) -> Iterator[None]:
        """Leads the attention layers here for a step; `longest_row` fixes what depends on length."""
        del longest_row
        yield
