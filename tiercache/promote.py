"""Copies up: a page's way to the device, or to host memory where that is enough."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from tiercache.entry import Entry, Place, Rise
from tiercache.errors import PageCorruptError, PageMissingError
from tiercache.payload import as_tensor, bytes_of, is_addressable
from tiercache.room import Room
from tiercache.tiers.base import ByteArray, PageMeta
from tiercache.transfer import Transfer


@dataclass(frozen=True, slots=True)
class Origin:
    """The copy that a page comes up from, pinned, and the staging that its way up takes.

    Attributes:
        level, place: where it lies.
        meta: its record.
        memory: room for the payload where its tier has no memory of its own, then, for a device's copies, for the
            decoded page; empty where neither is needed.
    """

    level: int
    place: Place
    meta: PageMeta
    memory: Sequence[ByteArray]


class Promotion:
    """Moves pages up. Its methods run outside the lock, on the thread that reads or on a worker."""

    def __init__(self, transfer: Transfer, room: Room) -> None:
        self._transfer = transfer
        self._books = transfer.books
        self._room = room

    def lift(self, entry: Entry, rise: Rise, deadline: float, *, keep: bool) -> Place:
        """Fills the room reserved at `rise.level` from the best copy below and publishes it.

        The caller has set `entry.rise`, marked it started and reserved `rise.place`. Whatever happens the rise
        is done afterwards. `keep` pins the place for the caller before anybody can evict it.

        Raises:
            PageMissingError: the page was discarded meanwhile.
            PageCorruptError: the last copy failed its proof; the page is gone and the caller captures again.
            TierIOError: a read was refused; the page stays where it is.
            TierFullError, StoreTimeoutError: staging could not be had; the page stays where it is.
        """
        books = self._books
        place = rise.place
        assert place is not None
        try:
            if rise.level == 0:
                self._stage(entry)
            while not self._fill(entry, place, rise.level, deadline, keep=keep):
                pass
        except BaseException as error:
            rise.error = error
            with books.changed:
                books.release_room(rise.level, place)
            raise
        finally:
            with books.changed:
                rise.done = True
                entry.rise = None
                books.settle(entry)
        return place

    def _fill(self, entry: Entry, place: Place, target: int, deadline: float, *, keep: bool) -> bool:
        """One try; False when a copy failed its proof and another is left."""
        books = self._books
        with self.origin(entry, target, deadline) as origin:
            with books.changed:
                books.use(entry, origin.level)
                entry.begin(target, place)
            start_s, loose = books.clock.now(), False
            try:
                if target == 0:
                    place.tensor, place.ready, loose = self.fetch(entry, origin, deadline)
                else:
                    self._fill_tier(origin, target, place)
            except BaseException as error:
                with books.changed:
                    entry.vacate(target)
                    books.unpin(entry, origin.place, origin.level, copy=True)
                    if isinstance(error, PageCorruptError) and self._drop_corrupt(entry, origin.level):
                        return False
                raise
            with books.changed:
                self._transfer.count(entry, origin.level, target, entry.num_bytes, start_s)
                books.publish(entry, target)
                if keep:
                    books.pin(entry, place, target)
                if not loose:
                    books.unpin(entry, origin.place, origin.level, copy=True)
                if entry.is_sum and entry.places[origin.level] is origin.place and origin.place.pins == 0:
                    books.vacate(entry, origin.level)
        return True

    @contextmanager
    def origin(self, entry: Entry, target: int, deadline: float) -> Iterator[Origin]:
        """The best copy below `target`, pinned for the caller, who ends the pin, and staging for its way up.

        Raises:
            PageMissingError: the page was discarded.
            TierFullError, StoreTimeoutError: staging could not be had.
        """
        books = self._books
        while True:
            with books.changed:
                level, place, meta = self._best(entry, target)
            sizes = self._sizes(entry, level, target, meta)
            with self._transfer.staging.borrow(sizes, deadline, f"read {entry.key}") as memory:
                # Nothing below was held while waiting for staging, so the copy may have moved.
                with books.changed:
                    if entry.places[level] is not place:
                        continue
                    books.pin(entry, place, level, copy=True)
                yield Origin(level, place, meta, memory)
                return

    def _best(self, entry: Entry, target: int) -> tuple[int, Place, PageMeta]:
        level = entry.source()
        if entry.dead or level is None or level <= target:
            raise PageMissingError(f"read {entry.key}: the page was discarded")
        place = entry.places[level]
        assert place is not None
        assert place.meta is not None
        return level, place, place.meta

    def _sizes(self, entry: Entry, level: int, target: int, meta: PageMeta) -> list[int]:
        """The staging that the way from `level` to `target` takes."""
        tiers, coded = self._books.tiers, meta.codec != "raw"
        late = target == 0 and self._books.engines.of(entry.device).late
        sizes = []
        direct = is_addressable(tiers[target]) if target > 0 else not coded and not late
        if not direct and not is_addressable(tiers[level]):
            sizes.append(meta.stored_bytes)
        if coded and late:
            sizes.append(entry.num_bytes)
        return sizes

    def fetch(self, entry: Entry, origin: Origin, deadline: float) -> tuple[torch.Tensor, object, bool]:
        """The page as a fresh tensor on its device.

        Returns:
            The tensor, the event after which it may be read, and whether the origin's pin ends by itself later.
        """
        books, meta = self._books, origin.meta
        engine = books.engines.of(entry.device)
        tensor = engine.empty(entry.shape, entry.dtype, entry.device)
        if not engine.late:
            if meta.codec == "raw":
                self._transfer.read(books.tiers[origin.level], origin.place.slot, bytes_of(tensor), meta)
            else:
                self._transfer.codecs.decode(self._payload(origin), meta, tensor)
            return tensor, None, False
        payload = self._payload(origin)
        if meta.codec == "raw":
            host = as_tensor(payload, entry.dtype, entry.shape)
        else:
            host = as_tensor(origin.memory[-1], entry.dtype, entry.shape)
            self._transfer.codecs.decode(payload, meta, host)
        event = engine.to_device(host, tensor)
        if origin.memory or entry.is_sum:
            # Staging goes back with this call, and a sum is changed after it.
            engine.finish(event, deadline, books.clock)
            return tensor, event, False

        def let_go() -> None:
            with books.changed:
                books.unpin(entry, origin.place, origin.level, copy=True)

        self._transfer.after(event, entry, deadline, let_go)
        return tensor, event, True

    def _payload(self, origin: Origin) -> ByteArray:
        """The payload as memory: the tier's own, or staging that it is read into."""
        tier, slot, meta = self._books.tiers[origin.level], origin.place.slot, origin.meta
        view = tier.view(slot)
        if view is not None:
            return view[: meta.stored_bytes]
        self._transfer.read(tier, slot, origin.memory[0], meta)
        return origin.memory[0]

    def _stage(self, entry: Entry) -> None:
        """Brings a disk page's payload into the host tier, if that admits it and has room at once.

        A device copies from there; on the CPU it is how a page that the host refused gets in when it is read again.
        """
        books = self._books
        with books.changed:
            level = entry.source()
            if level is None or level < 2 or entry.is_sum or entry.dead or entry.places[1] is not None:
                return
            if not books.engines.of(entry.device).late and not books.is_selective(1):
                return
            below = entry.places[level]
            assert below is not None
            assert below.meta is not None
            if not is_addressable(books.tiers[1]) or not books.admits(entry, 1, below.meta.stored_bytes):
                return
            place = self._room.acquire_at_once(1, below.meta.stored_bytes)
            if place is None:
                return
            books.pin(entry, below, level, copy=True)
            entry.begin(1, place)
        filled = False
        try:
            self._fill_tier(Origin(level, below, below.meta, ()), 1, place)
            filled = True
        except (PageCorruptError, OSError):
            pass  # the copy to the device meets the same and settles what becomes of the page
        finally:
            with books.changed:
                if filled:
                    books.publish(entry, 1)
                else:
                    books.abort(entry, 1)
                books.unpin(entry, below, level, copy=True)

    def _fill_tier(self, origin: Origin, target: int, place: Place) -> None:
        """Copies a payload as it is into a tier above it."""
        meta, tier = origin.meta, self._books.tiers[target]
        place.meta = meta
        view = tier.view(place.slot)
        if view is None:
            tier.write(place.slot, self._payload(origin), meta)
        else:
            below = self._books.tiers[origin.level]
            self._transfer.read(below, origin.place.slot, view[: meta.stored_bytes], meta)

    def _drop_corrupt(self, entry: Entry, level: int) -> bool:
        """Ends a copy that failed its proof; True when another copy is left to try."""
        books = self._books
        place = entry.places[level]
        if place is not None and place.pins == 0:
            books.vacate(entry, level)
        if entry.source() is not None:
            return not entry.dead
        books.counts.lost_pages += 1
        books.bury(entry)
        return False
