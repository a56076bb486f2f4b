"""TierStore, the one door to the tiers."""

from __future__ import annotations

import copy
import hashlib
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch

from tiercache.clean import Cleaner
from tiercache.clock import Clock
from tiercache.codecs import create_codec
from tiercache.config import Size, StoreConfig
from tiercache.config_file import read_options
from tiercache.demote import Demotion
from tiercache.entry import Entry, PageKey
from tiercache.errors import (
    PageMissingError,
    StoreClosedError,
    StoreForkedError,
    StoreTimeoutError,
    TierCacheError,
)
from tiercache.follow import Follower, reserve_rise
from tiercache.lease import Lease
from tiercache.lending import Loans
from tiercache.opening import create_tiers, io_of
from tiercache.payload import PageCodecs
from tiercache.placement import Books
from tiercache.plan import AccessPlan, Operation
from tiercache.promote import Promotion
from tiercache.reading import Leases
from tiercache.stats import Stats
from tiercache.streams import Engines
from tiercache.sums import Sums
from tiercache.threads import WorkerThreads
from tiercache.tiers.base import Slot, Tier
from tiercache.trace import AccessTrace, Timeline
from tiercache.transfer import Transfer
from tiercache.writing import Puts, check_page

Record = list[tuple[Operation, PageKey]]


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
    told = read_options(config) if config is not None else {}
    given = {"device": device, "host": host, "disk": disk}
    told |= {name: value for name, value in given.items() if value is not None} | options
    return TierStore(StoreConfig(**told))


class TierStore:
    """Keeps pages in device memory, host memory and on disk, and gives them back. Safe from several threads.

    Implementation notes. This class is the door: it looks pages up, notes each access for the plan and the trace,
    and hands the work on. `Books` holds the state and the lock; `Puts`, `Leases` and `Sums` carry out what callers
    ask for; `Room` and `Demotion` make room; `Promotion` brings pages up; `Cleaner` and the look-ahead of
    `Follower` run beside compute on `WorkerThreads`. Nothing blocks while the lock is held.

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
        if create_policy is None:
            # Imported here: the policies bring numba along.
            from tiercache import policies as shipped

            create_policy = shipped.create_policy
        self.config = config
        self._pid = os.getpid()
        self._clock = clock or Clock()
        self._start_s = self._clock.now()
        codecs = PageCodecs(config.codec, create_codec)
        engines = Engines(config.accelerator)
        chosen = list(tiers) if tiers is not None else create_tiers(config, pin=engines.any_late)
        policies = []
        for tier in chosen[:-1]:
            name, params = config.policy_of(tier.name)
            policies.append(create_policy(name, capacity_bytes=tier.capacity_bytes, **params))
        self._follower = Follower(None)
        self._books = Books(
            chosen, [*policies, None], engines, self._clock, lambda key: self._follower.next_use(key)
        )
        self._threads = WorkerThreads(config.transfer_threads, self._note_bug)
        self._timeline = Timeline(config.timeline, self._start_s) if config.timeline is not None else None
        self._trace = AccessTrace(config.trace) if config.trace is not None else None
        namespace = hashlib.blake2b(config.namespace, digest_size=32).digest()
        transfer = Transfer(self._books, codecs, self._threads, namespace, self._timeline)
        self._demotion = Demotion(transfer)
        room, timeout_s = self._demotion.room, config.timeout_s
        self._promotion = Promotion(transfer, room)
        self._leases = Leases(self._books, room, self._promotion, timeout_s)
        self._sums = Sums(transfer, room, self._promotion, timeout_s)
        self._puts = Puts(transfer, codecs, self._demotion, timeout_s)
        self._books.on_publish = Cleaner(transfer, self._demotion, timeout_s).poke
        self._loans = Loans(self._books, room)
        self._graph = 0
        self._records: list[Record] = []
        self._watched = self._trace is not None
        self._unwanted: deque[PageKey] = deque()
        self._bug: BaseException | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # Pages

    def new_graph(self) -> int:
        """A fresh id for the gradient pages and layer inputs of one graph, from 1."""
        self._check_process()
        with self._books.changed:
            self._books.check_open()
            self._graph += 1
            return self._graph

    def put(self, key: PageKey, tensor: torch.Tensor, *, own: bool = False) -> bool:
        """Stores an immutable page; visible when this returns, and never if it raises.

        Args:
            key: names the page. The same key again adds a reference, copies nothing and returns False.
            tensor: any dtype, shape and strides; kept contiguous. Not modified.
            own: hand the tensor over instead of copying it; the caller must not write to it any more.

        Raises:
            TierFullError: no tier has or can be given room.
            StoreTimeoutError: room was still being made at the deadline.
        """
        check_page(tensor, "put")
        self._check_process()
        with self._books.changed:
            self._begin("put", key)
            begun = self._puts.begin(key, tensor)
            if begun is None:
                return False
        self._puts.fill(begun[0], begun[1], tensor, own=own)
        return True

    def read(self, key: PageKey) -> Lease:
        """Leases a page on its device; waits, counted in `stall_s`, if it is not there yet.

        Raises:
            PageMissingError: no such page, with the reason.
            TierFullError: the device has no room for it.
            StoreTimeoutError: the page did not come up in time.
        """
        self._check_process()
        books = self._books
        with books.changed:
            entry = self._begin("read", key)
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
        self._check_process()
        with self._books.changed:
            self._begin("accumulate", key)
        self._sums.add(key, tensor.detach())

    def take(self, key: PageKey) -> torch.Tensor | None:
        """Removes a page and returns it as the caller's own tensor; None when absent.

        Of a page that was put several times one reference goes and a copy is returned.

        Raises:
            PageStateError: the page is leased.
        """
        self._check_process()
        with self._books.changed:
            self._begin("take", key)
        return self._sums.take(key)

    def contains(self, key: PageKey) -> bool:
        """Whether a read would find the page."""
        self._check_process()
        with self._books.changed:
            self._books.check_open()
            entry = self._books.table.get(key)
            return entry is not None and entry.visible

    def num_bytes(self, key: PageKey) -> int:
        """Logical size of a page. Raises PageMissingError."""
        self._check_process()
        with self._books.changed:
            self._books.check_open()
            entry = self._books.table.get(key)
            if entry is None or not entry.visible:
                raise PageMissingError(f"num_bytes {key}: no such page")
            return entry.num_bytes

    def discard(self, keys: Iterable[PageKey] | None = None, *, graph: int | None = None) -> None:
        """Drops a reference of each key, or everything of a graph; missing keys are fine, and so are leases."""
        self._check_process()
        books = self._books
        with books.changed:
            for key in keys or ():
                entry = self._begin("discard", key)
                if entry is not None:
                    self._drop(entry)
            if graph is not None:
                books.check_open()
                for key in list(books.graphs.get(graph, ())):
                    books.bury(books.table[key])

    def discard_later(self, keys: Iterable[PageKey]) -> None:
        """Drops a reference of each key, at once or at the store's next call; never waits: finalizers may call it."""
        self._unwanted.extend(keys)
        self._collect_if_free()

    # Loans

    def lend(self, num_bytes: int, *, evict: bool = False) -> Slot | None:
        """Sets room of the device tier aside for memory that the caller keeps; None when there is none to be had.

        Pages that lie further down too may be dropped for it; `evict` moves others down, if that can be done at once.
        `end_loan` ends it.

        Raises:
            TierIOError: a page that had to move down could not be written.
        """
        self._check_process()
        with self._books.changed:
            self._books.check_open()
            self._collect()
            slot = self._loans.lend(num_bytes)
        if slot is None and evict:
            slot = self._loans.lend_by_eviction(
                num_bytes, self._clock.now() + min(1.0, self.config.timeout_s)
            )
        return slot

    def end_loan(self, slot: Slot) -> None:
        """Ends a loan, at once or at the store's next call; never waits: finalizers may call it."""
        self._loans.give_back_later(slot)
        self._collect_if_free()

    def _collect_if_free(self) -> None:
        # The lock is not reentrant: a finalizer that runs inside the store finds it taken, by its own thread too.
        if os.getpid() == self._pid and self._books.changed.acquire(blocking=False):
            try:
                if not self._books.closed:
                    self._collect()
            finally:
                self._books.changed.release()

    def _drop(self, entry: Entry) -> None:
        entry.refs -= 1
        if entry.refs == 0:
            self._books.bury(entry)

    # The future

    def prefetch(self, keys: Iterable[PageKey]) -> None:
        """Hint that these pages are read soon: brings them up as far as there is room without a write."""
        self._check_process()
        books, rising = self._books, []
        with books.changed:
            books.check_open()
            for key in keys:
                entry = books.table.get(key)
                if entry is None or not entry.visible or entry.busy or entry.rise is not None:
                    continue
                if entry.source() in (None, 0):
                    continue
                if not reserve_rise(entry, 0, self._demotion.room):
                    break
                rising.append(entry)
            self._raise_later(rising)

    def follow(self, plan: AccessPlan | None) -> None:
        """Makes a plan's accesses, from the first, the known future; None ends that.

        The store then brings pages up ahead of their reads and evicts by distance. A run that deviates is
        counted in `deviations` and served all the same.
        """
        self._check_process()
        with self._books.changed:
            self._books.check_open()
            self._follower = Follower(plan)
            self._follower.begin(self._books)
            self._watched = self._trace is not None or bool(self._records) or self._follower.active
            if self._follower.active:
                self._raise_later(self._follower.look_ahead(self._books, self._demotion.room))

    def _raise_later(self, entries: list[Entry]) -> None:
        for entry in entries:
            rise = entry.rise
            assert rise is not None
            if not self._threads.submit(lambda entry=entry: self._carry_up(entry), up=True):  # type: ignore[misc]
                self._promotion.abandon(entry, rise, StoreTimeoutError("prefetch: the store is closing"))

    def _carry_up(self, entry: Entry) -> None:
        books = self._books
        with books.changed:
            rise = entry.rise
            if rise is None or rise.started or books.closed:
                return
            rise.started = True
        try:
            self._promotion.lift(entry, rise, self._clock.now() + self.config.timeout_s, keep=False)
        except (TierCacheError, OSError):
            return  # whoever waits for the page finds the error in the rise
        with books.changed:
            books.counts.prefetches += 1

    # The whole

    def flush(self) -> None:
        """Waits until no transfer is queued or in progress. Raises StoreTimeoutError."""
        self._check_process()
        with self._books.changed:
            self._books.check_open()
            self._collect()
        self._threads.drain(self._clock.now() + self.config.timeout_s, self._clock)
        if self._bug is not None:
            raise self._bug

    def stats(self) -> Stats:
        """What the store did so far; also after close."""
        books = self._books
        with books.changed:
            counts = copy.deepcopy(books.counts)
            counts.pages = sum(entry.visible for entry in books.table.values())
            counts.bytes_capacity = {tier.name: tier.capacity_bytes for tier in books.tiers}
            counts.bytes_used = {tier.name: tier.used_bytes for tier in books.tiers}
            counts.io = "" if books.closed else io_of(books.tiers)
            return counts

    @contextmanager
    def record_accesses(self) -> Iterator[Record]:
        """Collects (operation, key) of every access made inside the block, in order."""
        record: Record = []
        with self._books.changed:
            self._records.append(record)
            self._watched = True
        try:
            yield record
        finally:
            with self._books.changed:
                self._records = [other for other in self._records if other is not record]

    def check_integrity(self) -> None:
        """Raises AssertionError when books, tiers and policies do not agree, StoreClosedError after close."""
        self._check_process()
        with self._books.changed:
            self._books.check_open()
            self._collect()
            self._books.check_integrity()

    def close(self) -> None:
        """Ends transfers, threads and tiers, and drops every page. A second call does nothing.

        Raises:
            StoreTimeoutError: a thread was still blocked in a copy at the deadline.
        """
        self._check_process()
        books = self._books
        with books.changed:
            if books.closed:
                return
            books.closed = True
            books.changed.notify_all()
        deadline = self._clock.now() + self.config.timeout_s
        joined = self._threads.close(self.config.timeout_s)
        with books.changed:
            for entry in [entry for entry in books.by_id if entry is not None]:
                if entry.rise is not None and not entry.rise.started:
                    self._promotion.abandon(entry, entry.rise, StoreClosedError("the store was closed"))
            while any(books.transient) and self._clock.now() < deadline:
                self._clock.wait(books.changed, deadline - self._clock.now())
            ended = joined and not any(books.transient)
            books.forget_all()
        if not ended:
            raise StoreTimeoutError("close: a copy did not end", remedy="its tiers are left as they are")
        for tier in books.tiers:
            tier.close()
        for recorder in (self._trace, self._timeline):
            if recorder is not None:
                recorder.save()

    # Every access

    def _begin(self, operation: Operation, key: PageKey) -> Entry | None:
        """What every access does first: checks, overdue work, and notes for the plan and the trace."""
        books = self._books
        if books.closed:
            books.check_open()
        self._collect()
        entry = books.table.get(key)
        if self._watched:
            self._note(operation, key, entry)
        return entry

    def _collect(self) -> None:
        self._leases.collect()
        self._loans.collect()
        while self._unwanted:
            entry = self._books.table.get(self._unwanted.popleft())
            if entry is not None:
                self._drop(entry)

    def _note(self, operation: Operation, key: PageKey, entry: Entry | None) -> None:
        for record in self._records:
            record.append((operation, key))
        if self._trace is not None:
            level = entry.source() if entry is not None else None
            tier = self._books.tiers[level].name if level is not None else ""
            size = entry.num_bytes if entry is not None else 0
            self._trace.add(self._clock.now() - self._start_s, key, operation, size, tier)
        if self._follower.active:
            # Look-ahead first: until this access is noted, its page counts as needed now and makes no room.
            self._raise_later(self._follower.look_ahead(self._books, self._demotion.room))
            self._follower.note(operation, key, self._books)

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise StoreForkedError(
                "the store belongs to the parent process", remedy="open a store after the fork"
            )

    def _note_bug(self, error: BaseException) -> None:
        self._bug = error
