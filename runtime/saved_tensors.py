"""Saved-tensor hooks of captures: what autograd keeps for the pop's backward goes through the store.

Why not `offload`, which has hooks of the same kind: a step's plan names every page of a capture before it runs, by node
and order of saving, so each saved tensor is a page at once, whatever room there is, and the store moves pages by the
plan. `offload` knows no graph in advance: it keeps storages out of the store until its budget is spent, guesses the
order of backward, and serves backwards in any order, twice or never. What is the same in both, how a tensor that
stays is watched, is `Kept`.
"""

from __future__ import annotations

import weakref

import torch

from tiercache.entry import PageKey
from tiercache.errors import ParameterChangedError
from tiercache.runtime.frame import PageStore
from tiercache.runtime.offloading.exempt import Kept


class StoredTensor:
    """A saved tensor's page in the store, for one taking.

    Its version is watched for as long as somebody holds the tensor itself: hooks switch off autograd's own check.
    """

    __slots__ = ("_source", "_version", "key", "store")

    def __init__(self, store: PageStore, key: PageKey, tensor: torch.Tensor) -> None:
        self.store, self.key = store, key
        self._source = weakref.ref(tensor)
        self._version = tensor._version  # noqa: SLF001

    def check(self) -> None:
        """Raises ParameterChangedError when the tensor was changed after it was saved."""
        source = self._source()
        if source is not None and source._version != self._version:  # noqa: SLF001
            raise ParameterChangedError(
                f"tensor saved for backward of {self.key} was changed in place",
                got=f"version {source._version}",  # noqa: SLF001
                limit=f"version {self._version}",
            )

    def take(self) -> torch.Tensor:
        """The tensor's page, which is gone from the store then. Raises ParameterChangedError."""
        self.check()
        found = self.store.take(self.key)
        if found is None:
            raise ParameterChangedError(
                f"saved tensor {self.key} is gone", remedy="run backward once, before the graph is discarded"
            )
        return found


class LayerInputs:
    """Hooks around a checkpointed capture: layer inputs and the last norm's tensors go to the store.

    Each is read once, by the pop. Leaves and tensors without history (weights, rotary tables) stay where they
    are, and are watched: they live for the whole step anyway.

    Args:
        store: where they go.
        node: digest of the node, part of their key.
        graph: id of the graph, part of their key.
    """

    def __init__(self, store: PageStore, node: bytes, graph: int) -> None:
        self.store, self.node, self.graph = store, node, graph
        self._count = 0

    def hooks(self) -> torch.autograd.graph.saved_tensors_hooks:
        """The context manager to run the forward under."""
        return torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack)

    def pack(self, tensor: torch.Tensor) -> StoredTensor | Kept:
        """Stores a tensor that the graph computed; keeps others."""
        if tensor.grad_fn is None or not tensor.is_floating_point():
            return Kept(tensor)
        key = PageKey(self.node, self._count, "layer_input", self.graph)
        self._count += 1
        self.store.put(key, tensor.detach())
        return StoredTensor(self.store, key, tensor)

    @staticmethod
    def unpack(packed: StoredTensor | Kept) -> torch.Tensor:
        """Takes a stored tensor back. It is not kept: checkpointing holds on to what was packed until the pop ends."""
        return packed.take() if isinstance(packed, StoredTensor) else packed.get()
