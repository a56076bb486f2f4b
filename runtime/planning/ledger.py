"""A store that keeps what it was asked, and no bytes."""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from tiercache.entry import PageKey
from tiercache.runtime.kernels import accumulator_dtype
from tiercache.runtime.planning.counting import WorkCounter


@dataclass(slots=True)
class Traffic:
    """Bytes and calls by (operation, kind of page)."""

    num_bytes: Counter[tuple[str, str]] = field(default_factory=Counter)
    calls: Counter[tuple[str, str]] = field(default_factory=Counter)


@dataclass(frozen=True, slots=True)
class _Lease:
    tensor: torch.Tensor


class Ledger:
    """Shapes of pages by key; what is read or taken is a tensor without bytes.

    Attributes:
        traffic: since `reset`.
        tensor_types: that it takes, beside plain tensors.
    """

    tensor_types = (FakeTensor,)

    def __init__(self, counter: WorkCounter) -> None:
        self._counter = counter
        self._pages: dict[PageKey, tuple[torch.Size, torch.dtype]] = {}
        self.traffic = Traffic()

    def reset(self) -> None:
        """Begins a new stretch."""
        self.traffic = Traffic()

    def _note(self, operation: str, key: PageKey, num_bytes: int) -> None:
        self.traffic.num_bytes[operation, key.kind] += num_bytes
        self.traffic.calls[operation, key.kind] += 1

    def put(self, key: PageKey, tensor: torch.Tensor, *, own: bool = False) -> bool:
        """Notes a page."""
        del own
        self._pages[key] = (tensor.shape, tensor.dtype)
        self._note("put", key, tensor.numel() * tensor.element_size())
        return True

    def read(self, key: PageKey) -> Any:
        """A lease on a page, whose memory is the store's."""
        shape, dtype = self._pages[key]
        with self._counter.uncounted():
            tensor = torch.empty(shape, dtype=dtype)
        self._note("read", key, tensor.numel() * tensor.element_size())
        return nullcontext(_Lease(tensor))

    def accumulate(self, key: PageKey, tensor: torch.Tensor) -> None:
        """Notes an addition."""
        dtype = accumulator_dtype(tensor.dtype)
        self._pages[key] = (tensor.shape, dtype)
        self._note("accumulate", key, tensor.numel() * dtype.itemsize)

    def take(self, key: PageKey) -> torch.Tensor | None:
        """A page that is the caller's from now on."""
        page = self._pages.pop(key, None)
        if page is None:
            return None
        tensor = torch.empty(page[0], dtype=page[1])
        self._note("take", key, tensor.numel() * tensor.element_size())
        return tensor

    def release(self, key: PageKey) -> None:
        """Forgets a page."""
        self._pages.pop(key, None)

    def drop_node(self, node: bytes) -> None:
        """Forgets the pages of a node."""
        for key in [key for key in self._pages if key.node == node and not key.graph]:
            del self._pages[key]
