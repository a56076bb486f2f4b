"""Reads: a lease at once where the page is on the device, else a wait that is counted."""

from __future__ import annotations

import threading
from collections import deque

from tiercache.entry import Entry, PageKey, Place, Rise
from tiercache.errors import PageMissingError, TierCacheError
from tiercache.lease import Lease
from tiercache.placement import Books
from tiercache.promote import Promotion
from tiercache.room import Room
from tiercache.stalls import stalling


class Leases:
    """Grants and ends leases; brings up what is asked for and not on the device."""

    def __init__(self, books: Books, room: Room, promotion: Promotion, timeout_s: float) -> None:
        self._books = books
        self._room = room
        self._promotion = promotion
        self._timeout_s = timeout_s
        self._forgotten: deque[tuple[Entry, Place, int]] = deque()

    def grant(self, entry: Entry, place: Place) -> Lease:
        """A lease on a valid place on the device; the lock is held."""
        books = self._books
        books.pin(entry, place, 0)
        books.use(entry, 0)
        return self._enlist(entry, place)

    def _enlist(self, entry: Entry, place: Place) -> Lease:
        owners, thread = self._books.lease_owners, threading.get_ident()
        owners[thread] = owners.get(thread, 0) + 1
        entry.leases += 1
        if place.ahead:
            place.ahead = False
            self._books.counts.prefetches_used += 1
        tensor = place.tensor
        assert tensor is not None
        engine = self._books.engines.of(entry.device)
        if engine.late:
            engine.wait(place.ready, tensor)
            engine.use(tensor)
        return Lease(tensor, entry, place, thread, self)

    def end(self, entry: Entry, place: Place, thread: int) -> None:
        """Ends a lease."""
        with self._books.changed:
            self._end(entry, place, thread)

    def end_later(self, entry: Entry, place: Place, thread: int) -> None:
        """Ends a lease at the store's next call; takes no lock."""
        self._forgotten.append((entry, place, thread))

    def collect(self) -> None:
        """Ends leases that were forgotten; the lock is held."""
        while self._forgotten:
            self._end(*self._forgotten.popleft())

    def _end(self, entry: Entry, place: Place, thread: int) -> None:
        books = self._books
        if books.closed:
            return
        owners = books.lease_owners
        owners[thread] -= 1
        if not owners[thread]:
            del owners[thread]
        entry.leases -= 1
        books.unpin(entry, place, 0)
        if entry.refused and not place.pins and entry.places[0] is place and entry.has_copy_below(0):
            books.vacate(entry, 0, -1)  # it was let in for its leases alone

    def wait_for(self, key: PageKey) -> Lease:
        """A lease on a page that is not on the device yet. Runs outside the lock; the wait is counted.

        Raises:
            PageMissingError: no such page, or it was discarded meanwhile.
            TierFullError: the device has no room for it.
        """
        books = self._books
        deadline = books.clock.now() + self._timeout_s
        with stalling(books, "read", key):
            while True:
                with books.changed:
                    entry, rise = self._look(key, deadline)
                    if rise is None:
                        place = entry.valid_place(0)
                        assert place is not None
                        return self.grant(entry, place)
                place = self._rise(entry, rise, deadline)
                with books.changed:
                    books.check_open()
                    return self._enlist(entry, place)

    def _look(self, key: PageKey, deadline: float) -> tuple[Entry, Rise | None]:
        """Waits until the page is on the device (None) or this thread must bring it up (a started rise)."""
        books = self._books
        while True:
            entry = books.table.get(key)
            if entry is None:
                raise PageMissingError(
                    f"read {key}: no such page",
                    remedy="capture it again: it was never put, discarded or lost",
                )
            rise = entry.rise
            if entry.busy or not entry.visible:
                books.wait(deadline, f"read {key}")
            elif entry.valid_place(0) is not None:
                return entry, None
            elif rise is None:
                entry.rise = rise = Rise(0)
                rise.started = True
                entry.refused = books.last > 0 and not books.admits(entry, 0, entry.num_bytes)
                return entry, rise
            elif not rise.started and rise.level == 0:
                rise.started = True
                return entry, rise
            else:
                self._await(rise, deadline, key)

    def _await(self, rise: Rise, deadline: float, key: PageKey) -> None:
        while not rise.done:
            self._books.wait(deadline, f"read {key}")
        if isinstance(rise.error, TierCacheError | OSError) and not isinstance(rise.error, PageMissingError):
            raise rise.error

    def _rise(self, entry: Entry, rise: Rise, deadline: float) -> Place:
        """Carries out a started rise and returns its place, pinned for the caller."""
        if rise.place is None:
            try:
                place = self._room.acquire(0, entry.num_bytes, f"read {entry.key}", deadline)
            except BaseException as error:
                with self._books.changed:
                    self._books.abandon(entry, rise, error)
                raise
            rise.place = place
        return self._promotion.lift(entry, rise, deadline, keep=True)
