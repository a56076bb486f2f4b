"""Persistent pages: copied to disk soon after they are put, and found there by a later process."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch

from tiercache.demote import Demotion
from tiercache.entry import Entry, PageKey
from tiercache.errors import ConfigError, StoreTimeoutError
from tiercache.payload import record_digest
from tiercache.tiers.base import PageMeta, Slot
from tiercache.transfer import Transfer

Record = tuple[Slot, PageMeta]


class Keeper:
    """Writes persistent pages through to the lowest tier and takes them up again.

    A page that cannot be written, for want of room or of a working drive, is not kept; nothing else changes for
    it. `keep`, `finish` and `claim` run under the store's lock.
    """

    def __init__(self, transfer: Transfer, demotion: Demotion, namespace: bytes, timeout_s: float) -> None:
        self._transfer = transfer
        self._books = transfer.books
        self._demotion = demotion
        self._namespace = namespace
        self._timeout_s = timeout_s
        self._queue: deque[Entry] = deque()
        self._running = False

    def check(self, key: PageKey) -> None:
        """Raises ConfigError for a page that cannot be persistent."""
        if not self._books.tiers[-1].keeps_records:
            raise ConfigError(
                f"put {key}: this store keeps no pages",
                got="persistent=True",
                remedy='open it with disk=DIRECTORY and durability="process" or "power"',
            )
        if key.graph:
            raise ConfigError(
                f"put {key}: a page of a graph cannot be persistent",
                got=key.graph,
                limit="graph 0",
                remedy="ids of graphs start again with the next store",
            )

    def keep(self, entry: Entry) -> None:
        """Queues a page that was put."""
        self._queue.append(entry)
        if not self._running:
            self._running = self._transfer.threads.submit(self._run, up=False)

    def finish(self) -> None:
        """Waits for the queue, up to the deadline of every wait; what is not written then is not kept."""
        deadline = self._books.clock.now() + self._timeout_s
        try:
            while self._running:
                self._books.wait(deadline, "close: persistent pages")
        except StoreTimeoutError:
            self._queue.clear()

    def claim(self, keys: Sequence[PageKey], device: torch.device) -> bool:
        """A reference of each page, or of none."""
        books = self._books
        here = {key: books.table.get(key) for key in keys}
        if any(entry is not None and (not entry.visible or entry.busy) for entry in here.values()):
            return False
        absent, tier = [key for key, entry in here.items() if entry is None], books.tiers[-1]
        found = tier.lookup_many([record_digest(key, self._namespace) for key in absent])
        made = [one and self._entry(key, one[1], device) for key, one in zip(absent, found, strict=True)]
        if not all(made):
            for one in found:
                if one is not None:
                    tier.let_go(one[0])
            return False
        for entry, one in zip(made, found, strict=True):
            assert entry is not None
            assert one is not None
            books.adopt(entry, *one)
        for key in keys:
            books.table[key].refs += 1
        return True

    def _entry(self, key: PageKey, meta: PageMeta, device: torch.device) -> Entry | None:
        """The page that a record describes; None for one that this store must not believe or cannot read."""
        dtype = getattr(torch, meta.dtype, None)
        if meta.namespace != self._namespace or meta.key != key or not isinstance(dtype, torch.dtype):
            return None
        entry = Entry(key, dtype, meta.shape, device, len(self._books.tiers))
        sizes_agree = entry.num_bytes == meta.raw_bytes and min(meta.shape, default=0) >= 0
        is_raw = meta.codec == "raw" and meta.stored_bytes == meta.raw_bytes
        fits = meta.raw_bytes <= self._books.tiers[0].capacity_bytes
        codecs = self._transfer.codecs
        if not (sizes_agree and fits and (is_raw or (meta.codec != "raw" and codecs.can_decode(meta)))):
            return None
        entry.coding = codecs.of(key)
        return entry

    def _run(self) -> None:
        clock = self._books.clock
        try:
            while (claimed := self._next()) is not None:
                self._demotion.clean(*claimed, clock.now() + self._timeout_s, to_last=True)
        except BaseException:
            with self._books.changed:
                self._running = False
                self._books.notify()
            raise

    def _next(self) -> tuple[Entry, int] | None:
        """The next page that has no copy on disk, and the level of its lowest one, which is pinned; None at the end."""
        with self._books.changed:
            claimed = self._pin_next()
            if claimed is None:
                self._running = False
                self._books.notify()
            return claimed

    def _pin_next(self) -> tuple[Entry, int] | None:
        books = self._books
        while self._queue and not books.closed:
            entry = self._queue.popleft()
            levels = [level for level in range(len(entry.places)) if entry.valid_place(level) is not None]
            if entry.dead or not levels or levels[-1] == books.last:
                continue
            place = entry.places[levels[-1]]
            assert place is not None
            books.pin(entry, place, levels[-1], copy=True)
            return entry, levels[-1]
        return None
