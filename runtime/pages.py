"""A step's own view of the store: counts what it put, so that exactly that is dropped when it ends."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch

from tiercache.entry import PageKey
from tiercache.errors import ParameterChangedError


class StepPages:
    """Passes through to the store and remembers which content-keyed pages this step holds a reference of.

    Args:
        store: a `TierStore`.
        graph: id of the step; everything keyed by it is dropped by `drop_all`.
        persistent: content-keyed pages are put for later processes too.
    """

    def __init__(self, store: Any, graph: int, *, persistent: bool = False) -> None:
        self.store, self.graph, self.persistent = store, graph, persistent
        self.held: dict[bytes, Counter[PageKey]] = {}

    def put(self, key: PageKey, tensor: torch.Tensor, *, own: bool = False) -> bool:
        """Stores a page and holds a reference of it."""
        persistent = self.persistent and not key.graph
        stored: bool = self.store.put(key, tensor, own=own, persistent=persistent)
        if not key.graph:
            self.held.setdefault(key.node, Counter())[key] += 1
        return stored

    def read(self, key: PageKey) -> Any:
        """A lease."""
        return self.store.read(key)

    def accumulate(self, key: PageKey, tensor: torch.Tensor) -> None:
        """Adds into a sum."""
        self.store.accumulate(key, tensor)

    def take(self, key: PageKey) -> torch.Tensor | None:
        """Removes and returns a page of this step's graph."""
        taken: torch.Tensor | None = self.store.take(key)
        return taken

    def release(self, key: PageKey) -> None:
        """Gives back one of this step's references of a page: a layer that attends twice has put it twice."""
        held = self.held.get(key.node)
        if held is not None and held[key] > 0:
            held[key] -= 1
            self.store.discard([key])

    def drop_node(self, node: bytes) -> None:
        """Gives back this step's references of one node's pages."""
        keys = self.held.pop(node, None)
        if keys:
            self.store.discard(list(keys.elements()))

    def drop_all(self) -> None:
        """Gives back every reference, and all pages keyed by the step's graph."""
        keys = [key for held in self.held.values() for key in held.elements()]
        self.held.clear()
        if keys:
            self.store.discard(keys)
        self.store.discard(graph=self.graph)


def check_recomputed(store: Any, key: PageKey, again: torch.Tensor, layer: str) -> None:
    """Raises ParameterChangedError where what pop recomputes is not the captured page, bit for bit."""
    with store.read(key) as lease:
        page = lease.tensor
        if not torch.equal(
            page.contiguous().view(torch.uint8), again.detach().contiguous().view(torch.uint8)
        ):
            raise ParameterChangedError(
                f"pop of {layer}: the recomputed {key.kind} page differs from the captured one",
                got=f"{int((page != again).sum())} of {again.numel()} values",
                limit="bit-identical",
                remedy="keep weights, adapters and module modes unchanged between capture and pop",
            )
