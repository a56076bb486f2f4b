"""Saved-tensor hooks: what autograd keeps for backward goes through the store."""

from __future__ import annotations

import weakref
from typing import Any

import torch

from tiercache.entry import PageKey
from tiercache.errors import ParameterChangedError
from tiercache.runtime.frame import PageStore


class _Packed:
    """What stands in a graph for a tensor that lies in the store. Dropped unread, it drops the page."""

    __slots__ = ("__weakref__", "key", "source", "version")

    def __init__(self, key: PageKey, tensor: torch.Tensor) -> None:
        self.key = key
        self.source = weakref.ref(tensor)
        self.version = tensor._version  # noqa: SLF001 - hooks switch off autograd's own check


class LayerInputs:
    """Hooks around a checkpointed capture: layer inputs and the last norm's tensors go to the store.

    Each is read once, by the pop. Leaves and tensors without history (weights, rotary tables) stay where they
    are: they live for the whole step anyway.

    Args:
        store: where they go.
        node: digest of the node, part of their key.
        graph: id of the graph, part of their key.
    """

    def __init__(self, store: PageStore, node: bytes, graph: int) -> None:
        self.store, self.node, self.graph = store, node, graph
        self.keys: list[PageKey] = []

    def hooks(self) -> torch.autograd.graph.saved_tensors_hooks:
        """The context manager to run the forward under."""
        return torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack)

    def pack(self, tensor: torch.Tensor) -> Any:
        """Stores a tensor that the graph computed; passes others through."""
        if tensor.grad_fn is None or not tensor.is_floating_point():
            return tensor
        key = PageKey(self.node, len(self.keys), "layer_input", self.graph)
        self.keys.append(key)
        self.store.put(key, tensor.detach())
        return _Packed(key, tensor)

    def unpack(self, packed: Any) -> torch.Tensor:
        """Takes a stored tensor back."""
        if not isinstance(packed, _Packed):
            tensor: torch.Tensor = packed
            return tensor
        source = packed.source()
        if source is not None and source._version != packed.version:  # noqa: SLF001
            raise ParameterChangedError(
                f"tensor saved for backward of {packed.key} was changed in place",
                got=f"version {source._version}",  # noqa: SLF001
                limit=f"version {packed.version}",
            )
        found = self.store.take(packed.key)
        if found is None:
            raise ParameterChangedError(
                f"layer input {packed.key} is gone", remedy="run backward once, before the graph is discarded"
            )
        return found
