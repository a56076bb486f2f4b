"""What copies in both directions share: payloads as memory, counters, and the end of late copies."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import torch

from tiercache.coding import PageCodecs
from tiercache.entry import Entry
from tiercache.errors import StoreTimeoutError, TierFullError
from tiercache.payload import Source, as_tensor, bytes_of, is_addressable, page_meta
from tiercache.placement import Books
from tiercache.staging import Staging
from tiercache.threads import WorkerThreads
from tiercache.tiers.base import ByteArray, PageMeta, Slot, Tier
from tiercache.tiers.host import HostTier


class Transfer:
    """The tools of one store's copies. Its methods run outside the lock and may block on copies or disks.

    Attributes:
        books: of the store.
        codecs: for what lies below the device.
        threads: workers that move pages beside compute.
        staging: memory for what is on its way, lent by a part of the tier that is given.
    """

    def __init__(
        self,
        books: Books,
        codecs: PageCodecs,
        threads: WorkerThreads,
        staging: HostTier,
        namespace: bytes,
    ) -> None:
        self.books = books
        self.codecs = codecs
        self.threads = threads
        self.staging = Staging(staging, books.clock, self.end_one)
        self._namespace = namespace
        self._started: deque[Callable[[], None]] = deque()

    def raw_meta(self, entry: Entry) -> PageMeta:
        """The record of a page that is kept as raw bytes."""
        return page_meta(entry, self._namespace, "raw", entry.num_bytes)

    @contextmanager
    def source(self, entry: Entry, level: int, target: int, deadline: float) -> Iterator[Source]:
        """The payload at a pinned place for a tier below it, encoded where it comes from the device.

        Raises:
            TierFullError, StoreTimeoutError: staging could not be had.
        """
        place, tiers = entry.places[level], self.books.tiers
        assert place is not None
        if level == 0:
            assert place.tensor is not None
            with self.tensor_source(entry, place.tensor, place.ready, target, deadline, again=True) as source:
                yield source
            return
        tier, slot, meta = tiers[level], place.slot, place.meta
        assert meta is not None
        view = tier.view(slot)
        with ExitStack() as stack:
            recoded = self._recoded(entry, level, target, stack)
            if recoded is not None:
                yield recoded
            elif view is not None:
                yield Source.of(view[: meta.stored_bytes], meta)
            elif is_addressable(tiers[target]):
                yield Source(meta, lambda out: self.read(tier, slot, out, meta))
            else:
                borrow = self.staging.borrow([meta.stored_bytes], deadline, f"write {entry.key}")
                (data,) = stack.enter_context(borrow)
                self.read(tier, slot, data, meta)
                yield Source.of(data, meta)

    def _recoded(self, entry: Entry, level: int, target: int, stack: ExitStack) -> Source | None:
        """The payload of a tier below the device in the codec of another one.

        None where that is the same, and where staging is not free at once: who makes room in a tier for a payload
        that lies in staging may not wait for staging again.
        """
        place, tier, into = entry.places[level], self.books.tiers[level], self.books.tiers[target]
        assert place is not None
        assert place.meta is not None
        view = tier.view(place.slot)
        known = None if view is None else view[: place.meta.stored_bytes]
        if not self.codecs.differ(entry, place.meta, tier, into, known):
            return None
        sizes = self.codecs.sizes(entry, into, again=True)
        more = [entry.num_bytes, 0 if view is not None else place.meta.stored_bytes]
        try:
            borrow = self.staging.borrow([*sizes, *more], self.books.clock.now(), f"write {entry.key}")
            memory = stack.enter_context(borrow)
        except (TierFullError, StoreTimeoutError):
            return None
        payload = memory[-1] if view is None else view[: place.meta.stored_bytes]
        if view is None:
            self.read(tier, place.slot, payload, place.meta)
        page = as_tensor(memory[-2], entry.dtype, entry.shape)
        self.codecs.decode(payload, place.meta, page)
        if not sizes:
            return Source.of(bytes_of(page), self.raw_meta(entry))
        return self.codecs.encode(entry, page, into, self._namespace, memory, again=True)

    def read(self, tier: Tier, slot: Slot, out: ByteArray, meta: PageMeta) -> None:
        """Fills `out` from a slot; codecs that mind a tier's speed are told how long it took."""
        start_s = time.perf_counter()
        tier.read(slot, out, meta)
        if not is_addressable(tier):
            self.codecs.observe(tier, meta.stored_bytes, time.perf_counter() - start_s)

    @contextmanager
    def tensor_source(
        self, entry: Entry, tensor: torch.Tensor, ready: object, target: int, deadline: float, *, again: bool
    ) -> Iterator[Source]:
        """The payload of a tensor on its device; `again` when its values are a page's that a codec has fixed.

        A page for whose codec staging is too small is kept as raw bytes, and counted.
        """
        here = is_plain(tensor) and not self.books.engines.of(entry.device).late
        copy = [] if here else [entry.num_bytes]
        into = self.books.tiers[target]
        sizes = self.codecs.sizes(entry, into, again=again)
        coded = bool(sizes)
        sizes += copy
        if coded and not self.staging.fits(sizes):
            self.books.counts.uncoded += 1
            coded = False
            if not again:
                entry.coding = entry.coding.exact()
        if not coded:
            sizes = [] if is_addressable(into) else copy
        with self.staging.borrow(sizes, deadline, f"write {entry.key}") as memory:
            page = tensor
            if not here and sizes:
                page = as_tensor(memory[-1], entry.dtype, entry.shape)
                self._fetch(tensor, ready, memory[-1], deadline)
            if coded:
                yield self.codecs.encode(entry, page, into, self._namespace, memory, again=again)
            elif here or sizes:
                yield Source.of(bytes_of(page), self.raw_meta(entry))
            else:
                raw = self.raw_meta(entry)
                yield Source(raw, lambda out: self._fetch(tensor, ready, out, deadline))

    @contextmanager
    def host_copy(self, tensor: torch.Tensor, deadline: float, what: str) -> Iterator[torch.Tensor]:
        """A device's tensor in staging, complete."""
        engine = self.books.engines.of(tensor.device)
        with self.staging.borrow([tensor.numel() * tensor.itemsize], deadline, what) as (memory,):
            self._fetch(tensor, engine.mark(tensor), memory, deadline)
            yield as_tensor(memory, tensor.dtype, tuple(tensor.shape))

    def _fetch(self, tensor: torch.Tensor, ready: object, out: ByteArray, deadline: float) -> None:
        """Copies a tensor's elements to host memory, and waits for that."""
        engine = self.books.engines.of(tensor.device)
        event = engine.to_host(tensor, as_tensor(out, tensor.dtype, tuple(tensor.shape)), ready)
        engine.finish(event, deadline, self.books.clock)

    def fix(
        self, entry: Entry, tensor: torch.Tensor, deadline: float, keep: Callable[[Source], None]
    ) -> torch.Tensor | None:
        """What a lossy codec makes of a tensor, as another on its device: the page's values from now on.

        None where staging is too small for that: the page is then kept exact. The payload is handed to `keep` where
        encoding the values again would not give it.
        """
        engine, codec = self.books.engines.of(entry.device), entry.coding.fixes
        here = is_plain(tensor) and not engine.late
        sizes = [codec.max_encoded_bytes(entry.dtype, entry.shape)] + ([] if here else [entry.num_bytes])
        if not self.staging.fits(sizes):
            self.books.counts.uncoded += 1
            return None
        with self.staging.borrow(sizes, deadline, f"put {entry.key}") as memory:
            page = tensor
            if not here:
                page = as_tensor(memory[-1], entry.dtype, entry.shape)
                self._fetch(tensor, engine.mark(tensor), memory[-1], deadline)
            out = engine.empty(entry.shape, entry.dtype, entry.device)
            fixed = page if engine.late else out
            payload = self.codecs.fix(entry, page, fixed, memory)
            if not codec.stable and payload.size < entry.num_bytes:
                keep(Source.of(payload, page_meta(entry, self._namespace, codec.name, payload.size)))
            if engine.late:
                engine.finish(engine.to_device(fixed, out), deadline, self.books.clock)
            return out

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
        """Runs `then` once a late copy's event happened: on another thread, or here where there is none."""
        engine = self.books.engines.of(entry.device)

        def job() -> None:
            try:
                engine.finish(event, deadline, self.books.clock)
            finally:
                then()

        if threading.current_thread().name.startswith(WorkerThreads.NAME):
            job()
            return
        self._started.append(job)
        if not self.threads.submit(self.end_one, up=True):
            self.end_one()

    def end_one(self) -> None:
        """Waits for the late copy that was started first among those left, if any."""
        try:
            job = self._started.popleft()
        except IndexError:
            return
        job()


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether the tensor's memory is its elements in order."""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()
