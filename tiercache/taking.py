"""Hand-overs: pages that leave the store."""

from __future__ import annotations

import torch

from tiercache.entry import Entry, PageKey
from tiercache.errors import PageMissingError, PageStateError
from tiercache.placement import Books
from tiercache.promote import Promotion
from tiercache.stalls import count_stall, stalling


def idle_entry(books: Books, key: PageKey, operation: str, deadline: float) -> Entry | None:
    """The page's entry once no thread changes or moves it, the wait counted; None when absent. The lock is held.

    Raises:
        PageStateError: the page is leased.
        StoreTimeoutError: it was still in use at the deadline.
    """
    what = f"{operation} {key}"
    while True:
        entry = books.table.get(key)
        if entry is None:
            return None
        if entry.leases:
            raise PageStateError(f"{what}: the page is leased", remedy="end the lease first")
        moving = any(place is not None and (place.pins or not place.valid) for place in entry.places)
        if entry.visible and not entry.busy and entry.rise is None and not moving:
            return entry
        rise = entry.rise
        if rise is not None and not rise.started:
            books.abandon(entry, rise, PageStateError(f"{what}: changed before it came up"))
            continue
        start_s = books.clock.now()
        try:
            books.wait(deadline, what)
        finally:
            count_stall(books, operation, key, start_s)


class HandOver:
    """Takes pages out. Its methods run outside the lock; a page is `busy` meanwhile, and everybody else waits."""

    def __init__(self, promotion: Promotion, books: Books, timeout_s: float) -> None:
        self._books = books
        self._promotion = promotion
        self._timeout_s = timeout_s

    def take(self, key: PageKey) -> torch.Tensor | None:
        """Removes a page and returns its bytes as the caller's own tensor; None when absent."""
        books = self._books
        deadline = books.clock.now() + self._timeout_s
        with books.changed:
            entry = idle_entry(books, key, "take", deadline)
            if entry is None:
                return None
            level = entry.source()
            assert level is not None
            place = entry.places[level]
            assert place is not None
            engine = books.engines.of(entry.device)
            if level == 0 and entry.refs == 1:
                tensor = place.tensor
                assert tensor is not None
                engine.wait(place.ready, tensor)
                engine.use(tensor)
                place.tensor = None  # handed over, not freed
                books.bury(entry)
                return tensor
            entry.busy = True
        taken = False
        try:
            tensor = self._copy_out(entry, deadline)
            taken = True
        except PageMissingError:
            return None  # discarded meanwhile
        finally:
            with books.changed:
                entry.busy = False
                books.settle(entry)
                books.notify()
                if taken:
                    entry.refs -= 1
                    if entry.refs == 0:
                        books.bury(entry)
        return tensor

    def _copy_out(self, entry: Entry, deadline: float) -> torch.Tensor:
        """A copy of a busy page, on the caller's stream."""
        books = self._books
        engine = books.engines.of(entry.device)
        with books.changed:
            place = entry.valid_place(0)
            if place is not None:
                books.pin(entry, place, 0, copy=True)
        if place is not None:
            try:
                assert place.tensor is not None
                engine.wait(place.ready, place.tensor)
                engine.use(place.tensor)
                return engine.clone(place.tensor, entry.dtype)
            finally:
                with books.changed:
                    books.unpin(entry, place, 0, copy=True)
        with (
            stalling(books, "take", entry.key),
            self._promotion.origin(entry, 0, deadline) as origin,
        ):
            loose = False
            try:
                tensor, ready, loose = self._promotion.fetch(entry, origin, deadline)
            finally:
                if not loose:
                    with books.changed:
                        books.unpin(entry, origin.place, origin.level, copy=True)
        engine.wait(ready, tensor)
        engine.use(tensor)
        return tensor
