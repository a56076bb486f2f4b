"""Loans: room of the device tier for memory that a caller keeps itself, counted in the same budget."""

from __future__ import annotations

from collections import deque

from tiercache.entry import Place
from tiercache.errors import StoreTimeoutError, TierFullError
from tiercache.placement import Books
from tiercache.room import Room
from tiercache.tiers.base import Slot


class Loans:
    """Room that is lent, and room that finalizers gave back. All but `lend_by_eviction` run under the store's lock."""

    def __init__(self, books: Books, room: Room) -> None:
        self._books = books
        self._room = room
        self._returned: deque[Slot] = deque()

    def lend(self, num_bytes: int) -> Slot | None:
        """Room that is free, or that dropping pages which lie further down too gives; else None."""
        place = self._room.acquire_at_once(0, num_bytes)
        return self._enlist(place) if place is not None else None

    def lend_by_eviction(self, num_bytes: int, deadline: float) -> Slot | None:
        """Room that moving pages down gives; None when that is not possible by the deadline."""
        try:
            place = self._room.acquire(0, num_bytes, "lend", deadline)
        except (TierFullError, StoreTimeoutError):
            return None
        with self._books.changed:
            return self._enlist(place)

    def _enlist(self, place: Place) -> Slot:
        # Nobody waits for a loan's end as one waits for a copy's.
        self._books.transient[0] -= 1
        self._books.lent_bytes += place.slot.num_bytes
        return place.slot

    def give_back_later(self, slot: Slot) -> None:
        """Notes the end of a loan; takes no lock."""
        self._returned.append(slot)

    def collect(self) -> None:
        """Frees what was given back."""
        books = self._books
        while self._returned:
            slot = self._returned.popleft()
            if not books.closed:
                books.held[0] -= slot.num_bytes
                books.lent_bytes -= slot.num_bytes
                books.tiers[0].free(slot)
                books.notify()
