"""TierStore, the one door to the tiers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from tiercache.clock import Clock
from tiercache.config import Size, StoreConfig
from tiercache.config_file import read_options
from tiercache.entry import PageKey
from tiercache.errors import PageMissingError
from tiercache.lease import Lease
from tiercache.plan import AccessPlan
from tiercache.store_life import StoreLife
from tiercache.sums import dtype_of_sum
from tiercache.tiers.base import Slot, Tier
from tiercache.writing import check_page


def open_store(
    device: Size | None = None,
    host: Any = None,
    disk: Any = None,
    *,
    config: str | Path | None = None,
    **options: Any,
) -> TierStore:
    """A store with these budgets, to be used as a context manager.

    Args:
        device: budget of the device tier, in bytes or as "8GiB" (the default); in RAM without an accelerator.
        host: budget of the host tier; None or 0 for none.
        disk: directory or directories of the disk tier; None for none.
        config: file of options (TOML or JSON), as `tiercache tune` writes it; options given here come first.
        options: fields of `StoreConfig`; `disk_capacity` is needed with a directory.

    Raises:
        ConfigError: an option that cannot be meant or has no effect.
    """
    given = {"device": device, "host": host, "disk": disk}
    told = {name: value for name, value in given.items() if value is not None} | options
    return TierStore(StoreConfig(**((read_options(config) if config is not None else {}) | told)))


class TierStore(StoreLife):
    """Keeps pages in device memory, host memory and on disk, and gives them back. Safe from several threads.

    Implementation notes. This class is the door: it looks pages up and hands the work on to its `Parts`; how it
    opens and closes is in `StoreLife`. `Books` holds the state and the lock; `Entrance` lets calls in; `Accesses`
    notes each access for the plan and the trace; `Puts`, `Leases`, `Sums` and `HandOver` carry out what callers ask
    for; `Room` and `Demotion` make room; `Promotion` brings pages up; `Staging` lends the memory that copies take;
    `Cleaner` and the look-ahead of `Follower` run beside compute on `WorkerThreads`. Nothing blocks while the lock is
    held.

    Args:
        config: options, validated.
        tiers: the tiers themselves instead of those that the options describe, from the device down.
        create_policy: makes an eviction policy, instead of `tiercache.policies.create_policy`.
        clock: time, for tests.
    """

    def __init__(
        self,
        config: StoreConfig,
        *,
        tiers: Sequence[Tier] | None = None,
        create_policy: Callable[..., Any] | None = None,
        clock: Clock | None = None,
    ) -> None:
        super().__init__(config, tiers, create_policy, clock or Clock())
        self._graph = 0
        parts = self._parts
        self._puts, self._leases, self._sums = parts.puts, parts.leases, parts.sums
        self._hand_over = parts.hand_over
        self._discards, self._loans, self._accesses = parts.discards, parts.loans, parts.accesses

    # Pages

    def new_graph(self) -> int:
        """A fresh id for the gradient pages and layer inputs of one graph, from 1."""
        with self._entrance:
            self._graph += 1
            return self._graph

    def put(self, key: PageKey, tensor: torch.Tensor, *, own: bool = False, persistent: bool = False) -> bool:
        """Stores an immutable page; visible when this returns, and never if it raises.

        Args:
            key: names the page. The same key again adds a reference, copies nothing and returns False.
            tensor: any dtype, shape and strides; kept contiguous. Not modified.
            own: hand the tensor over instead of copying it; the caller must not write to it any more.
            persistent: keep the page on disk beyond its last reference and this process, for `claim`, until the
                room is needed. Its key must name all that the page depends on, by what it is.

        Raises:
            ConfigError: `persistent` in a store that keeps no pages, or of a page that belongs to a graph.
            TierFullError: no tier has or can be given room.
            StoreTimeoutError: room was still being made at the deadline.
        """
        check_page(tensor, "put")
        if persistent:
            self._parts.keeper.check(key)
        self._entrance.check_process()
        with self._books.changed:
            self._entrance.begin("put", key, tensor.nbytes)
            begun = self._puts.begin(key, tensor, persistent=persistent)
            if begun is None:
                return False
        self._puts.fill(begun[0], begun[1], tensor, own=own)
        return True

    def claim(self, keys: Sequence[PageKey], device: torch.device) -> bool:
        """Takes a reference of each page, as a put would, if all are here or were kept on disk; else of none.

        Args:
            keys: of pages that were put as persistent, by this store or by an earlier one on the same directory.
            device: that pages from disk are read to.
        """
        with self._entrance:
            self._entrance.collect()
            return self._parts.keeper.claim(keys, device)

    def read(self, key: PageKey) -> Lease:
        """Leases a page on its device; waits, counted in `stall_s`, if it is not there yet.

        Raises:
            PageMissingError: no such page, with the reason.
            TierFullError: the device has no room for it.
            StoreTimeoutError: the page did not come up in time.
        """
        self._entrance.check_process()
        books = self._books
        with books.changed:
            entry = self._entrance.begin("read", key)
            books.counts.reads += 1
            if entry is not None and entry.visible and not entry.busy:
                place = entry.places[0]
                if place is not None and place.valid:
                    books.counts.hits += 1
                    return self._leases.grant(entry, place)
            books.counts.misses += 1
        return self._leases.wait_for(key)

    def accumulate(self, key: PageKey, tensor: torch.Tensor) -> None:
        """Adds to a sum, created when absent: in fp32, or fp64 when the first tensor is fp64.

        The sum is never lossy and is added to where it lives; one on disk is brought up first. Not modified.

        Raises:
            PageStateError: the page is leased, or was put.
            TierFullError: a new sum, or one on disk, finds no room.
        """
        check_page(tensor, "accumulate")
        self._entrance.check_process()
        with self._books.changed:
            self._entrance.begin("accumulate", key, tensor.numel() * dtype_of_sum(tensor).itemsize)
        self._sums.add(key, tensor.detach())

    def take(self, key: PageKey) -> torch.Tensor | None:
        """Removes a page and returns it as the caller's own tensor; None when absent.

        Of a page that was put several times one reference goes and a copy is returned.

        Raises:
            PageStateError: the page is leased.
        """
        self._entrance.check_process()
        with self._books.changed:
            self._entrance.begin("take", key)
        return self._hand_over.take(key)

    def contains(self, key: PageKey) -> bool:
        """Whether a read would find the page."""
        with self._entrance:
            entry = self._books.table.get(key)
            return entry is not None and entry.visible

    def num_bytes(self, key: PageKey) -> int:
        """Logical size of a page. Raises PageMissingError."""
        with self._entrance:
            entry = self._books.table.get(key)
            if entry is None or not entry.visible:
                raise PageMissingError(f"num_bytes {key}: no such page")
            return entry.num_bytes

    def discard(self, keys: Iterable[PageKey] | None = None, *, graph: int | None = None) -> None:
        """Drops a reference of each key, or everything of a graph; missing keys are fine, and so are leases.

        Room comes free at once, and for a page that is being copied when its copy ends: `flush` waits for that.
        """
        with self._entrance:
            self._entrance.collect()
            for key in keys or ():
                entry = self._entrance.begin("discard", key)
                if entry is not None:
                    self._discards.drop(entry)
            if graph is not None:
                self._discards.drop_graph(graph)

    def discard_later(self, keys: Iterable[PageKey]) -> None:
        """Drops a reference of each key, at once or at the store's next call; never waits: finalizers may call it."""
        self._discards.drop_later(keys)
        self._entrance.collect_if_free()

    # Loans

    def lend(self, num_bytes: int, *, evict: bool = False) -> Slot | None:
        """Sets room of the device tier aside for memory that the caller keeps; None when there is none to be had.

        Pages that lie further down too may be dropped for it; `evict` moves others down, if that can be done at once.
        `end_loan` ends it.

        Raises:
            TierIOError: a page that had to move down could not be written.
        """
        with self._entrance:
            self._entrance.collect()
            slot = self._loans.lend(num_bytes)
        if slot is None and evict:
            deadline = self._books.clock.now() + min(1.0, self.config.timeout_s)
            slot = self._loans.lend_by_eviction(num_bytes, deadline)
        return slot

    def end_loan(self, slot: Slot) -> None:
        """Ends a loan, at once or at the store's next call; never waits: finalizers may call it."""
        self._loans.give_back_later(slot)
        self._entrance.collect_if_free()

    # The future

    def prefetch(self, keys: Iterable[PageKey]) -> None:
        """Hint that these pages are read soon: brings them up as far as there is room without a write."""
        with self._entrance:
            self._accesses.prefetch(keys)

    def follow(self, plan: AccessPlan | None) -> None:
        """Makes a plan's accesses, from the first, the known future; None ends that.

        The store then brings pages up ahead of their reads and evicts by distance. A run that deviates is
        counted in `deviations` and served all the same.
        """
        with self._entrance:
            self._accesses.follow(plan)
