"""Transformers layers that attend to the keys which an indexer selects: it ranks them page by page, by its own code.

The indexer runs as it does with a cache: it is given keys where it takes them from one, and the scores that it ranks
are read where it asks for their highest.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from tiercache.errors import ConfigError
from tiercache.runtime.adapters.base import Router
from tiercache.runtime.adapters.code import takes_cache
from tiercache.runtime.forwards import Forward, replaced_forwards
from tiercache.runtime.selection import Best, Selection, select

_HIGHEST = (torch.topk, torch.Tensor.topk)


def selects_keys(module: nn.Module) -> bool:
    """Whether a module gives its cache keys to rank."""
    return takes_cache(module, {"update_indexer"})


def indexers(model: nn.Module) -> dict[str, nn.Module]:
    """Modules, by name, that select keys for attention."""
    return {name: module for name, module in model.named_modules() if selects_keys(module)}


def ranks_tokens(indexer: Any) -> bool:
    """Whether an indexer scores keys one by one, and not pools of them."""
    return hasattr(indexer, "index_topk") and not hasattr(indexer, "index_kpool")


@contextmanager
def indexers_led(layers: dict[str, nn.Module], router: Router) -> Iterator[None]:
    """Makes each indexer select from the pages of the visit that `router` names."""
    forwards = [
        (layer, partial(_run, layer.forward, router, index, name, layer))
        for index, (name, layer) in enumerate(layers.items())
    ]
    with replaced_forwards(forwards):
        yield


def _run(
    forward: Forward, router: Router, index: int, name: str, layer: Any, *args: Any, **kwargs: Any
) -> Selection:
    if router.frame is None:
        raise ConfigError(f"{name} was called outside a visit", remedy="call the model through BranchReplay")
    given = inspect.signature(forward).bind(*args, **kwargs).arguments
    rank = partial(_rank, forward, given, router.frame.num_tokens)
    return select(router.frame, index, rank, layer.index_topk)


@torch.no_grad()
def _rank(
    forward: Forward,
    given: dict[str, Any],
    length: int,
    queries: slice,
    give: Callable[[torch.Tensor], torch.Tensor],
    seen: torch.Tensor,
) -> Best:
    """By the indexer's own forward on some of its queries."""
    mine = {name: _rows(value, queries, length) for name, value in given.items()}
    highest = _Highest()
    with highest:
        forward(**mine | {"attention_mask": seen, "cache": _Keys(give)})
    return highest.found


def _rows(value: Any, queries: slice, length: int) -> Any:
    """Of tensors [1, T, ...], and of those in a tuple, the part of some queries; anything else itself."""
    if isinstance(value, tuple):
        return tuple(_rows(item, queries, length) for item in value)
    has_rows = isinstance(value, torch.Tensor) and value.ndim > 1 and value.shape[1] == length
    return value[:, queries] if has_rows else value


class _Keys:
    """Stands where an indexer takes its cache."""

    def __init__(self, give: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._give = give

    def update_indexer(self, own: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        """The keys to rank."""
        return self._give(own)


class _Highest(TorchFunctionMode):
    """Notes what the indexer finds highest."""

    found: Best

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Runs the function."""
        result = func(*args, **(kwargs or {}))
        if func in _HIGHEST:
            self.found = (result[0][0], result[1][0])
        return result
