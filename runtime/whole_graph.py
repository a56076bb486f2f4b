"""Hooks around a capture whose whole graph is kept: what its backward needs lies in the store."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from tiercache.entry import PageKey
from tiercache.runtime.frame import PageStore
from tiercache.runtime.offloading.exempt import Kept, is_kept
from tiercache.runtime.saved_tensors import StoredTensor

_Identity = tuple[object, ...]


class _Saved(StoredTensor):
    """A tensor that the graph saved once or more: its page, then, from the first use on, the tensor itself."""

    __slots__ = ("_tensor",)

    def __init__(self, store: PageStore, key: PageKey, tensor: torch.Tensor) -> None:
        super().__init__(store, key, tensor)
        self._tensor: torch.Tensor | None = None

    def get(self) -> torch.Tensor:
        self.check()
        if self._tensor is None:
            self._tensor = self.take()
        return self._tensor


class _Look:
    """What stands in the graph for a saved tensor: its page and, where that is a whole storage, how to look at it."""

    __slots__ = ("offset", "saved", "shape", "stride", "whole")

    def __init__(self, saved: _Saved, tensor: torch.Tensor, *, whole: bool) -> None:
        self.saved, self.whole = saved, whole
        self.shape, self.stride, self.offset = tensor.shape, tensor.stride(), tensor.storage_offset()

    def get(self) -> torch.Tensor:
        tensor = self.saved.get()
        return tensor.as_strided(self.shape, self.stride, self.offset) if self.whole else tensor


class WholeGraph:
    """Hooks that put every floating-point tensor of a capture's graph into the store, each once.

    Pages are numbered in the order of their first saving, which is the same in every capture of a model whose graph
    does not depend on its data. A storage that a saved tensor fills is handed over, not copied; autograd's rule that
    nobody writes to it until backward is the store's rule too. Parameters, buffers, scalars and integers stay.

    Args:
        store: where they go.
        node: digest of the node, part of their key.
        graph: id of the graph, part of their key.
        owners: tensors whose storages somebody else holds for the whole step: parameters and buffers.
    """

    def __init__(self, store: PageStore, node: bytes, graph: int, owners: Iterable[torch.Tensor]) -> None:
        self.store, self.node, self.graph = store, node, graph
        self._types: tuple[type, ...] = getattr(store, "tensor_types", ())  # beside plain ones: a rehearsal's
        self._owned = {tensor.untyped_storage()._cdata for tensor in owners}  # noqa: SLF001
        # A weak reference keeps the number of a dead storage from being given to another.
        self._seen: dict[_Identity, tuple[_Saved, StorageWeakRef]] = {}
        self._count = 0

    @contextmanager
    def hooks(self) -> Iterator[None]:
        """The context manager to run the forward under."""
        try:
            with torch.autograd.graph.saved_tensors_hooks(self.pack, _unpack):
                yield
        finally:
            self._seen.clear()

    def pack(self, tensor: torch.Tensor) -> Any:
        """What the graph keeps instead of a saved tensor."""
        storage = tensor.untyped_storage()
        num_bytes = tensor.numel() * tensor.element_size()
        if self._stays(tensor, storage, num_bytes):
            return Kept(tensor)
        whole = storage.nbytes() == num_bytes
        place = (storage._cdata, tensor.storage_offset(), tensor.shape, tensor.stride())  # noqa: SLF001
        identity = (*place, tensor.dtype, tensor._version)  # noqa: SLF001
        found = self._seen.get(identity)
        if found is not None and not found[1].expired():
            return _Look(found[0], tensor, whole=whole)
        saved = _Saved(self.store, PageKey(self.node, self._count, "saved_tensor", self.graph), tensor)
        self._count += 1
        self._seen[identity] = (saved, StorageWeakRef(storage))
        flat = tensor.detach()
        if whole:
            flat = flat.as_strided((tensor.numel(),), (1,), 0)
        self.store.put(saved.key, flat, own=True)
        return _Look(saved, tensor, whole=whole)

    def _stays(self, tensor: torch.Tensor, storage: torch.UntypedStorage, num_bytes: int) -> bool:
        is_number = tensor.dtype.is_floating_point or tensor.dtype.is_complex or tensor.dtype == torch.bool
        return (
            not is_number
            or tensor.dim() == 0
            or is_kept(tensor, 1, self._types)
            or storage._cdata in self._owned  # noqa: SLF001
            or storage.nbytes() < num_bytes  # expanded: its bytes are few
            or tensor.is_conj()
            or tensor.is_neg()
        )


def _unpack(packed: Any) -> torch.Tensor:
    tensor: torch.Tensor = packed.get()
    return tensor
