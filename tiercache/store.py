"""TierStore, the one door to the tiers."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import torch

from tiercache.config import Size, StoreConfig, parse_size
from tiercache.entry import PageKey
from tiercache.errors import PageMissingError, PageStateError, StoreClosedError, TierFullError
from tiercache.lease import Lease
from tiercache.plan import AccessPlan, Operation
from tiercache.stats import Stats


@dataclass(slots=True)
class _Page:
    tensor: torch.Tensor
    tier: int
    refs: int = 1
    leases: int = 0
    is_sum: bool = False

    @property
    def num_bytes(self) -> int:
        return self.tensor.numel() * self.tensor.element_size()


def open_store(device: Size = "8GiB", host: Any = None, disk: Any = None, **options: Any) -> TierStore:
    """A store with these budgets; options are those of `StoreConfig`. Use it as a context manager."""
    return TierStore(StoreConfig(device=device, host=host, disk=disk, **options))


class TierStore:
    """Keeps pages in tiers and gives them back. Safe from several threads."""

    def __init__(self, config: StoreConfig) -> None:
        self.config = config
        self._names = ["device"]
        self._capacity = [config.device_bytes]
        if config.host:
            self._names.append("host")
            self._capacity.append(parse_size(config.host, "host"))
        if config.disk is not None and config.disk_capacity is not None:
            self._names.append("disk")
            self._capacity.append(parse_size(config.disk_capacity, "disk_capacity"))
        self._used = [0] * len(self._names)
        self._pages: OrderedDict[PageKey, _Page] = OrderedDict()
        self._lock = threading.RLock()
        self._graph = 0
        self._closed = False
        self._stats = Stats()
        self._recorders: list[list[tuple[Operation, PageKey]]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def new_graph(self) -> int:
        """A fresh id for the gradient pages and layer inputs of one graph, from 1."""
        with self._lock:
            self._check_open()
            self._graph += 1
            return self._graph

    def put(self, key: PageKey, tensor: torch.Tensor, *, own: bool = False) -> bool:
        """Stores an immutable page; the same key again adds a reference and returns False."""
        with self._lock:
            self._record("put", key)
            page = self._pages.get(key)
            if page is not None:
                page.refs += 1
                return False
            size = tensor.numel() * tensor.element_size()
            tier = self._room(size, key)
            held = tensor.detach() if own and tensor.is_contiguous() else tensor.detach().clone()
            self._add(key, _Page(held, tier))
            return True

    def read(self, key: PageKey) -> Lease:
        """Leases a page on its device. Raises PageMissingError."""
        with self._lock:
            self._record("read", key)
            page = self._pages.get(key)
            if page is None:
                raise PageMissingError(f"read {key}: no such page")
            self._stats.reads += 1
            if page.tier == 0:
                self._stats.hits += 1
            else:
                self._move(key, page, 0)
                self._stats.misses += 1
            self._pages.move_to_end(key)
            page.leases += 1
        return Lease(page.tensor, lambda: self._release(page))

    def accumulate(self, key: PageKey, tensor: torch.Tensor) -> None:
        """Adds to an fp32 (fp64 for fp64 tensors) sum, created when absent."""
        with self._lock:
            self._record("accumulate", key)
            page = self._pages.get(key)
            dtype = torch.float64 if tensor.dtype == torch.float64 else torch.float32
            if page is None:
                tier = self._room(tensor.numel() * dtype.itemsize, key)
                held = tensor.detach().to(dtype, copy=True).contiguous()
                self._add(key, _Page(held, tier, is_sum=True))
                return
            if page.leases or not page.is_sum:
                raise PageStateError(f"accumulate {key}: the page is leased or was put")
            page.tensor.add_(tensor.detach())
            self._pages.move_to_end(key)

    def take(self, key: PageKey) -> torch.Tensor | None:
        """Removes and returns a page, owned by the caller; None when absent."""
        with self._lock:
            self._record("take", key)
            page = self._pages.get(key)
            if page is None:
                return None
            if page.leases:
                raise PageStateError(f"take {key}: the page is leased")
            self._drop(key)
            return page.tensor

    def contains(self, key: PageKey) -> bool:
        """Whether a read would find the page."""
        with self._lock:
            self._check_open()
            return key in self._pages

    def num_bytes(self, key: PageKey) -> int:
        """Logical size of a page. Raises PageMissingError."""
        with self._lock:
            if key not in self._pages:
                raise PageMissingError(f"num_bytes {key}: no such page")
            return self._pages[key].num_bytes

    def prefetch(self, keys: Iterable[PageKey]) -> None:
        """Hint that these pages are read soon."""

    def follow(self, plan: AccessPlan | None) -> None:
        """Makes the accesses of a plan the known future; None ends that."""

    def discard(self, keys: Iterable[PageKey] | None = None, *, graph: int | None = None) -> None:
        """Drops a reference of each key, or everything of a graph; missing keys are fine."""
        with self._lock:
            for key in list(keys or ()):
                self._record("discard", key)
                page = self._pages.get(key)
                if page is not None:
                    page.refs -= 1
                    if page.refs == 0:
                        self._drop(key)
            if graph is not None:
                for key in [key for key in self._pages if key.graph == graph]:
                    self._drop(key)

    def flush(self) -> None:
        """Waits until no transfer is in progress."""

    def stats(self) -> Stats:
        """What the store did so far."""
        with self._lock:
            self._stats.pages = len(self._pages)
            self._stats.bytes_used = dict(zip(self._names, self._used, strict=True))
            self._stats.bytes_capacity = dict(zip(self._names, self._capacity, strict=True))
            return self._stats

    @contextmanager
    def record_accesses(self) -> Iterator[list[tuple[Operation, PageKey]]]:
        """Collects (operation, key) of every access made inside the block, in order."""
        record: list[tuple[Operation, PageKey]] = []
        self._recorders.append(record)
        try:
            yield record
        finally:
            self._recorders.remove(record)

    def check_integrity(self) -> None:
        """Raises AssertionError when the books do not add up."""
        with self._lock:
            for tier, capacity in enumerate(self._capacity):
                used = sum(page.num_bytes for page in self._pages.values() if page.tier == tier)
                assert used == self._used[tier] <= capacity

    def close(self) -> None:
        """Ends the store. A second call does nothing."""
        with self._lock:
            self._closed = True
            self._pages.clear()
            self._used = [0] * len(self._names)

    def _check_open(self) -> None:
        if self._closed:
            raise StoreClosedError("the store is closed")

    def _record(self, operation: Operation, key: PageKey) -> None:
        self._check_open()
        for record in self._recorders:
            record.append((operation, key))

    def _add(self, key: PageKey, page: _Page) -> None:
        self._pages[key] = page
        self._used[page.tier] += page.num_bytes
        self._stats.puts += 1

    def _drop(self, key: PageKey) -> None:
        page = self._pages.pop(key)
        self._used[page.tier] -= page.num_bytes

    def _release(self, page: _Page) -> None:
        with self._lock:
            page.leases -= 1

    def _move(self, key: PageKey, page: _Page, tier: int) -> None:
        self._used[page.tier] -= page.num_bytes
        source, page.tier = page.tier, -1
        try:
            page.tier = self._room(page.num_bytes, key, tier, strict=True)
        except TierFullError:
            page.tier = source
            self._used[source] += page.num_bytes
            raise
        self._used[page.tier] += page.num_bytes

    def _room(self, need: int, key: PageKey, tier: int = 0, *, strict: bool = False) -> int:
        """The tier, from `tier` down, with room for `need` bytes once old pages moved down."""
        if tier == len(self._capacity):
            raise TierFullError(f"{key}: no room", got=need, limit=self._capacity, remedy="raise a budget")
        for other, page in list(self._pages.items()):
            if self._used[tier] + need <= self._capacity[tier]:
                break
            if page.tier == tier and not page.leases and need <= self._capacity[tier]:
                try:
                    self._move(other, page, tier + 1)
                except TierFullError:
                    break
        if self._used[tier] + need <= self._capacity[tier]:
            return tier
        if strict and tier == 0:
            raise TierFullError(f"{key}: no room", got=need, limit=self._capacity[0], remedy="raise device")
        return self._room(need, key, tier + 1, strict=strict)
