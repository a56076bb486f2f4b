"""What copies in both directions share: payloads as memory, counters, and the wait for late copies."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import numpy as np
import torch

from tiercache.coding import PageCodecs
from tiercache.entry import Entry
from tiercache.payload import ArraySource, LateSource, Source, as_tensor, bytes_of, is_addressable, page_meta
from tiercache.placement import Books
from tiercache.threads import WorkerThreads
from tiercache.tiers.base import ByteArray, PageMeta, Slot, Tier


class Transfer:
    """The tools of one store's copies. Its methods run outside the lock and may block on copies or disks.

    Attributes:
        books: of the store.
        codecs: for what lies below the device.
        threads: workers that move pages beside compute.
    """

    def __init__(
        self,
        books: Books,
        codecs: PageCodecs,
        threads: WorkerThreads,
        namespace: bytes,
    ) -> None:
        self.books = books
        self.codecs = codecs
        self.threads = threads
        self._namespace = namespace

    def stored(self, entry: Entry, level: int) -> ByteArray:
        """The payload at a pinned place below the device: the tier's memory, or a copy where it has none."""
        place = entry.places[level]
        assert place is not None
        assert place.meta is not None
        tier, size = self.books.tiers[level], place.meta.stored_bytes
        view = tier.view(place.slot)
        if view is not None:
            return view[:size]
        out = np.empty(size, np.uint8)
        self.read(tier, place.slot, out, place.meta)
        return out

    def raw_meta(self, entry: Entry) -> PageMeta:
        """The record of a page that is kept as raw bytes."""
        return page_meta(entry, self._namespace, "raw", entry.num_bytes)

    def source(self, entry: Entry, level: int, target: int, deadline: float) -> Source:
        """The payload at a pinned place for a tier below, encoded where it comes from the device or another codec."""
        place, into = entry.places[level], self.books.tiers[target]
        assert place is not None
        if level == 0:
            assert place.tensor is not None
            return self.tensor_source(entry, place.tensor, place.ready, target, deadline, again=True)
        assert place.meta is not None
        payload = self.stored(entry, level)
        if not self.codecs.differ(entry, place.meta, self.books.tiers[level], into):
            return ArraySource(payload, place.meta)
        page = torch.empty(entry.shape, dtype=entry.dtype)
        self.codecs.decode(payload, place.meta, page)
        return self.codecs.encode(entry, page, into, self._namespace, again=True)

    def read(self, tier: Tier, slot: Slot, out: ByteArray, meta: PageMeta) -> None:
        """Fills `out` from a slot; codecs that mind a tier's speed are told how long it took."""
        start_s = time.perf_counter()
        tier.read(slot, out, meta)
        if not is_addressable(tier):
            self.codecs.observe(tier, meta.stored_bytes, time.perf_counter() - start_s)

    def tensor_source(
        self, entry: Entry, tensor: torch.Tensor, ready: object, target: int, deadline: float, *, again: bool
    ) -> Source:
        """The payload of a contiguous tensor for a tier; `again` when its values are a page's that are fixed."""
        into, coding = self.books.tiers[target], entry.coding
        exact = coding is None or (coding.at(into) is None and (again or coding.fixes is None))
        engine = self.books.engines.of(entry.device)
        raw = self.raw_meta(entry)
        if not engine.late:
            if exact:
                return ArraySource(bytes_of(tensor), raw)
            return self.codecs.encode(entry, tensor, into, self._namespace, again=again)

        def fetch(out: ByteArray) -> None:
            event = engine.to_host(tensor, as_tensor(out, entry.dtype, entry.shape), ready)
            engine.finish(event, deadline, self.books.clock)

        late = LateSource(fetch, raw)
        if exact:
            return late
        copy = as_tensor(late.data(), entry.dtype, entry.shape)
        return self.codecs.encode(entry, copy, into, self._namespace, again=again)

    def fix(self, entry: Entry, tensor: torch.Tensor, keep: Callable[[Source], None]) -> torch.Tensor:
        """What a lossy codec makes of a tensor, on the tensor's device: the page's values from now on.

        The payload is handed to `keep` where encoding the values again would not give it.
        """
        codec = entry.coding.fixes
        fixed = torch.empty(entry.shape, dtype=entry.dtype)
        payload = self.codecs.fix(entry, tensor.detach().to("cpu"), fixed)
        if not codec.stable and payload.size < entry.num_bytes:
            keep(ArraySource(payload, page_meta(entry, self._namespace, codec.name, payload.size)))
        return fixed.to(entry.device)

    def count(self, entry: Entry, origin: int, target: int, num_bytes: int, start_s: float) -> None:
        """Notes a finished copy; the lock is held."""
        books = self.books
        direction = f"{books.tiers[origin].name}->{books.tiers[target].name}"
        moved = books.counts.bytes_moved
        moved[direction] = moved.get(direction, 0) + num_bytes
        books.pace.note_copy(origin, target, num_bytes, books.clock.now() - start_s)
        if books.timeline is not None:
            books.timeline.copied(direction, str(entry.key), start_s, books.clock.now(), num_bytes)

    def after(self, event: object, entry: Entry, deadline: float, then: Callable[[], None]) -> None:
        """Runs `then` once a late copy's event happened: on a worker thread, or here where there is none."""
        engine = self.books.engines.of(entry.device)

        def job() -> None:
            try:
                engine.finish(event, deadline, self.books.clock)
            finally:
                then()

        on_worker = threading.current_thread().name.startswith(WorkerThreads.NAME)
        if on_worker or not self.threads.submit(job, up=True):
            job()
