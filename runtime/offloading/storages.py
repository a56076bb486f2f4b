"""One storage that autograd keeps alive, and the views of it that were saved."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

from tiercache.errors import SavedTensorChangedError

RESIDENT, MOVING, STORED = "resident", "moving", "stored"

# A moved range starts at a multiple of this, so that any dtype can look at it.
_ALIGN_BYTES = 16


def check_version(what: str, now: int, then: int) -> None:
    """Raises SavedTensorChangedError unless a tensor's version is what it was when it was saved."""
    if now != then:
        raise SavedTensorChangedError(
            f"a saved tensor, {what}, was modified by an in-place operation",
            got=f"version {now}",
            limit=f"version {then}, when it was saved for backward",
            remedy="clone it before changing it, or change it after backward",
        )


class View:
    """A saved tensor as a look at its storage.

    Attributes:
        alias: the tensor, detached (an output in its own graph would be a cycle), until its storage is moved.
        version: of the tensor when it was packed.
        seen: of the tensor when its storage was moved; nobody could change it after that.
    """

    __slots__ = ("alias", "conj", "dtype", "neg", "offset", "seen", "shape", "stride", "version")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.alias: torch.Tensor | None = tensor.detach()
        self.version = self.seen = tensor._version  # noqa: SLF001 - hooks switch off autograd's own check
        self.dtype = tensor.dtype
        self.shape = tensor.shape
        self.stride = tensor.stride()
        self.offset = tensor.storage_offset()
        self.conj = tensor.is_conj()
        self.neg = tensor.is_neg()

    def extent(self) -> tuple[int, int]:
        """First byte and end of what the view shows of its storage."""
        last = sum((size - 1) * step for size, step in zip(self.shape, self.stride, strict=True))
        size = self.dtype.itemsize
        return int(self.offset) * size, (int(self.offset) + int(last) + 1) * size

    def check(self, version: int) -> None:
        """Raises SavedTensorChangedError unless the tensor is as it was when it was packed."""
        if version != self.version:
            check_version(f"{tuple(self.shape)} {self.dtype}", version, self.version)


class Handle:
    """What stands in the graph for a saved tensor. Dropped with the graph, it drops the bytes only it needs."""

    __slots__ = ("saved", "view")

    def __init__(self, saved: SavedStorage, view: View) -> None:
        self.saved = saved
        self.view = view

    def __del__(self) -> None:
        self.saved.session.forget(self.saved, self.view)


class SavedStorage:
    """One storage: resident, moving between here and the store, or stored.

    Attributes:
        session: brings the bytes back, and is told when a view is not needed any more.
        sequence: order of its first packing; names its page.
        cdata: identity of the storage while it is here.
        num_bytes: what keeping it costs.
        on_host: in the host's memory, rather than an accelerator's.
        views: those that the graph still needs.
        base: bytes from `start` on, restored from the store.
        decode: makes the moved range of what the store kept.
        parked: somebody else holds the storage: moving it would free nothing, so it is not counted.
        wanted: its page was asked for ahead of use.
    """

    __slots__ = (
        "base", "base_version", "cdata", "decode", "num_bytes", "on_host", "parked", "sequence", "session",
        "start", "state", "views", "wanted",
    )  # fmt: skip

    def __init__(self, session: Any, sequence: int, storage: torch.UntypedStorage) -> None:
        self.session = session
        self.sequence = sequence
        self.cdata = storage._cdata  # noqa: SLF001
        self.num_bytes = storage.nbytes()
        self.on_host = storage.device.type == "cpu"
        self.views: list[View] = []
        self.state = RESIDENT
        self.base: torch.Tensor | None = None
        self.base_version = 0
        self.start = 0
        self.decode: Callable[[torch.Tensor], torch.Tensor] | None = None
        self.parked = False
        self.wanted = False

    def tensor(self, view: View) -> torch.Tensor:
        """The saved tensor of a resident storage. Raises SavedTensorChangedError."""
        if view.alias is not None:
            view.check(view.alias._version)  # noqa: SLF001
            return view.alias
        view.check(view.seen)
        assert self.base is not None
        if self.base._version != self.base_version:  # noqa: SLF001
            view.check(view.version + 1)
        return self.look(view)

    def look(self, view: View) -> torch.Tensor:
        """The view of the restored bytes, with its strides, offset and lazy bits."""
        assert self.base is not None
        size = view.dtype.itemsize
        data = self.base[: self.base.numel() // size * size].view(view.dtype)
        tensor = data.as_strided(view.shape, view.stride, view.offset - self.start // size)
        if view.conj:
            tensor = tensor.conj()
        return torch._neg_view(tensor) if view.neg else tensor  # noqa: SLF001

    def is_ours(self) -> bool:
        """Whether nobody but the graph holds the storage: moving it frees it, and nobody can change it meanwhile."""
        ours = [view.alias for view in self.views if view.alias is not None]
        ours += [self.base] if self.base is not None else []
        return bool(ours) and count_holders(ours[0]) == len(ours)

    def detach(self) -> torch.Tensor:
        """Takes the bytes that the views need out, as a one-dimensional tensor; what is left is metadata."""
        if self.base is not None:
            changed = self.base._version != self.base_version  # noqa: SLF001
            flat, begin = self.base, self.start
        else:
            changed = False
            whole = next(view.alias for view in self.views if view.alias is not None)
            begin, end = self._extent()
            flat = flat_bytes(whole, begin, end)
        for view in self.views:
            if view.alias is not None:
                view.seen = view.alias._version  # noqa: SLF001
                view.alias = None
            elif changed:
                view.seen = -1
        self.start, self.base = begin, None
        return flat

    def _extent(self) -> tuple[int, int]:
        extents = [view.extent() for view in self.views]
        begin = min(first for first, _ in extents) // _ALIGN_BYTES * _ALIGN_BYTES
        end = max(last for _, last in extents)
        return begin, min(self.num_bytes, -(-end // _ALIGN_BYTES) * _ALIGN_BYTES)

    def attach(self, flat: torch.Tensor) -> None:
        """Takes moved bytes back in; the caller gives them up."""
        self.base = flat.view(torch.uint8)
        self.base_version = self.base._version  # noqa: SLF001
        storage = flat.untyped_storage()
        self.cdata, self.num_bytes = storage._cdata, storage.nbytes()  # noqa: SLF001


def flat_bytes(tensor: torch.Tensor, begin: int, end: int) -> torch.Tensor:
    """Bytes [begin, end) of a tensor's storage: the storage itself where that is nearly all of it, else a copy."""
    storage = tensor.untyped_storage()
    whole = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(
        storage, 0, (storage.nbytes(),), (1,)
    )
    if (end - begin) * 4 >= storage.nbytes() * 3:
        return whole
    return whole[begin:end].clone()


def count_holders(tensor: torch.Tensor) -> int:
    """How many tensors, of whomever, share the tensor's storage; large when Python holds the storage itself."""
    storage = tensor.untyped_storage()
    if sys.getrefcount(storage) > _UNSHARED_REFERENCES:
        return sys.maxsize
    # The Python object of the storage counts as one.
    return int(torch._C._storage_Use_Count(storage._cdata)) - 1  # noqa: SLF001


# The local variable, the argument of getrefcount and the storage's own link to its Python object.
_UNSHARED_REFERENCES = 3
