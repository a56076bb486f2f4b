"""Copies up: a page's way to the device, or to host memory where that is enough."""

from __future__ import annotations

import torch

from tiercache.entry import Entry, Place, Rise
from tiercache.errors import PageCorruptError, PageMissingError
from tiercache.payload import as_tensor, bytes_of
from tiercache.room import Room
from tiercache.streams import CopyEngine
from tiercache.transfer import Transfer


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
        """
        books = self._books
        place = rise.place
        assert place is not None
        try:
            while not self._fill(entry, place, rise, deadline, keep=keep):
                pass
        except BaseException as error:
            rise.error = error
            raise
        finally:
            with books.changed:
                rise.done = True
                entry.rise = None
                books.settle(entry)
        return place

    def _fill(self, entry: Entry, place: Place, rise: Rise, deadline: float, *, keep: bool) -> bool:
        """One try; False when a copy failed its proof and another is left."""
        books, target = self._books, rise.level
        with books.changed:
            level = entry.source()
            if entry.dead or level is None or level <= target:
                books.release_room(target, place)
                raise PageMissingError(f"read {entry.key}: the page was discarded")
            below = entry.places[level]
            assert below is not None
            books.pin(entry, below, level, copy=True)
            books.use(entry, level)
            entry.begin(target, place)
        start_s = books.clock.now()
        try:
            if target == 0:
                place.tensor, place.ready, loose = self.fetch(entry, level, deadline)
            else:
                loose = False
                self._fill_tier(entry, level, target, place)
        except BaseException as error:
            with books.changed:
                entry.vacate(target)
                books.unpin(entry, below, level, copy=True)
                if isinstance(error, PageCorruptError) and self._drop_corrupt(entry, level):
                    return False
                books.release_room(target, place)
            raise
        with books.changed:
            self._transfer.count(entry, level, target, entry.num_bytes, start_s)
            books.publish(entry, target)
            if keep:
                books.pin(entry, place, target)
            if not loose:
                books.unpin(entry, below, level, copy=True)
            if entry.is_sum and entry.places[level] is below and below.pins == 0:
                books.vacate(entry, level)
        return True

    def fetch(self, entry: Entry, level: int, deadline: float) -> tuple[torch.Tensor, object, bool]:
        """The page of a place pinned by the caller, as a fresh tensor on its device.

        Returns:
            The tensor, the event after which it may be read, and whether the pin ends by itself later.
        """
        books = self._books
        below = entry.places[level]
        assert below is not None
        assert below.meta is not None
        engine, meta = books.engines.of(entry.device), below.meta
        tensor = engine.empty(entry.shape, entry.dtype, entry.device)
        if engine.late:
            return tensor, *self._fetch_late(entry, level, tensor, engine, deadline)
        staged = self._stage(entry, level) if level > 1 and books.is_selective(1) else None
        source, origin = (below, level) if staged is None else (staged, 1)
        try:
            if meta.codec == "raw":
                self._transfer.read(books.tiers[origin], source.slot, bytes_of(tensor), meta)
            else:
                self._transfer.codecs.decode(self._transfer.stored(entry, origin), meta, tensor)
        finally:
            if staged is not None:
                with books.changed:
                    books.unpin(entry, staged, 1, copy=True)
        return tensor, None, False

    def _fetch_late(
        self, entry: Entry, level: int, tensor: torch.Tensor, engine: CopyEngine, deadline: float
    ) -> tuple[object, bool]:
        """Starts the copy to a device; the source stays pinned until its event."""
        books, below = self._books, entry.places[level]
        assert below is not None
        assert below.meta is not None
        staged = self._stage(entry, level)
        try:
            payload = self._transfer.stored(entry, level if staged is None else 1)
            if below.meta.codec == "raw":
                host = as_tensor(payload, entry.dtype, entry.shape)
            else:
                host = torch.empty(entry.shape, dtype=entry.dtype)
                self._transfer.codecs.decode(payload, below.meta, host)
            event = engine.to_device(host, tensor)
        except BaseException:
            if staged is not None:
                with books.changed:
                    books.unpin(entry, staged, 1, copy=True)
            raise
        keep_alive = [host]
        if entry.is_sum:
            engine.finish(event, deadline, books.clock)
            return event, False

        def let_go() -> None:
            keep_alive.clear()
            with books.changed:
                books.unpin(entry, below, level, copy=True)
                if staged is not None:
                    books.unpin(entry, staged, 1, copy=True)

        self._transfer.after(event, entry, deadline, let_go)
        return event, True

    def _stage(self, entry: Entry, level: int) -> Place | None:
        """Brings a disk page's payload into the host tier, if that admits it and has room at once.

        A device copies from there; on the CPU it is how a page that the host refused gets in when it is read again.
        """
        books = self._books
        if level < 2 or entry.is_sum:
            return None
        below = entry.places[level]
        assert below is not None
        assert below.meta is not None
        with books.changed:
            if (
                entry.dead
                or entry.places[1] is not None
                or not books.admits(entry, 1, below.meta.stored_bytes)
            ):
                return None
            place = self._room.acquire_at_once(1, below.meta.stored_bytes)
            if place is None:
                return None
            entry.begin(1, place)
        try:
            self._fill_tier(entry, level, 1, place)
        except BaseException:
            with books.changed:
                books.abort(entry, 1)
            raise
        with books.changed:
            books.publish(entry, 1)
            books.pin(entry, place, 1, copy=True)
        return place

    def _fill_tier(self, entry: Entry, level: int, target: int, place: Place) -> None:
        """Copies a payload as it is from a pinned place into a tier above it."""
        below, tier = entry.places[level], self._books.tiers[target]
        assert below is not None
        assert below.meta is not None
        place.meta = below.meta
        view = tier.view(place.slot)
        if view is None:
            tier.write(place.slot, self._transfer.stored(entry, level), below.meta)
        else:
            payload = view[: below.meta.stored_bytes]
            self._transfer.read(self._books.tiers[level], below.slot, payload, below.meta)

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
