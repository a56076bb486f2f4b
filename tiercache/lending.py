"""Loans: room of the device tier for memory that a caller keeps itself, counted in the same budget."""

from __future__ import annotations

from collections import deque

from tiercache.placement import Books
from tiercache.room import Room
from tiercache.tiers.base import Slot


class Loans:
    """Room that is lent out, and room that finalizers gave back. The store's lock is held by its callers."""

    def __init__(self, books: Books, room: Room) -> None:
        self._books = books
        self._room = room
        self._returned: deque[Slot] = deque()

    def lend(self, num_bytes: int) -> Slot | None:
        """Room that is free, or that dropping pages which lie further down too gives; else None."""
        place = self._room.acquire_at_once(0, num_bytes)
        if place is None:
            return None
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
