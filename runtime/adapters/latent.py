"""Transformers layers of multi-head latent attention: pages are what they give their cache, not what they attend to."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from tiercache.errors import ConfigError
from tiercache.runtime.adapters.base import Router
from tiercache.runtime.adapters.code import takes_cache
from tiercache.runtime.forwards import Forward, replaced_forwards
from tiercache.runtime.latents import Latents, Pair, tapped

_EXPANDS = {"expand_kv"}


def latent_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Modules, by name, that give their cache a latent and expand what it gives back."""
    return {name: module for name, module in model.named_modules() if takes_cache(module, _EXPANDS)}


@contextmanager
def latents_led(layers: dict[str, nn.Module], router: Router) -> Iterator[None]:
    """Notes each layer's latents for its attention call, under the module."""
    forwards = [(layer, partial(_run, layer.forward, router, layer, name)) for name, layer in layers.items()]
    with replaced_forwards(forwards):
        yield


def _run(forward: Forward, router: Router, layer: nn.Module, name: str, *args: Any, **kwargs: Any) -> Any:
    if router.frame is None:
        raise ConfigError(f"{name} was called outside a visit", remedy="call the model through BranchReplay")
    return forward(*args, **{**kwargs, "cache": _Noting(router, layer)})


class _Noting:
    """Stands where the layer takes its cache, and gives back what it got."""

    def __init__(self, router: Router, layer: nn.Module) -> None:
        self._router, self._layer = router, layer

    def update(self, latent: torch.Tensor, rotary: torch.Tensor, *_: Any, **__: Any) -> Pair:
        router, layer = self._router, self._layer
        assert router.frame is not None
        pair = tapped(latent, rotary, router.frame, lambda: router.specs[layer])
        router.latents[layer] = Latents(pair, partial(_expand, layer, _autocast(latent.device.type)))
        return pair


def _autocast(device: str) -> torch.dtype | None:
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None


def _expand(layer: Any, autocast: torch.dtype | None, latent: torch.Tensor, rotary: torch.Tensor) -> Pair:
    """By the layer's own method, under the autocast of its forward, on whatever thread a backward runs."""
    with torch.autocast(latent.device.type, autocast, enabled=autocast is not None, cache_enabled=False):
        keys, values = layer.expand_kv(latent, rotary)
    return (keys, values) if autocast is None else (keys.to(autocast), values.to(autocast))
