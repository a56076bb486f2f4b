"""Write-behind: pages that will be evicted first are copied down before anybody needs their room."""

from __future__ import annotations

from tiercache.demote import Demotion
from tiercache.entry import Entry, Place
from tiercache.transfer import Transfer

# The shares of a tier that are kept free or clean, and that are looked at first; seconds of rest after a failed copy.
_HEADROOM = 4
_FIRST_LOOK = 16
_PAUSES_S = (0.1, 30.0)


class Cleaner:
    """Keeps the next victims of every tier clean, so that evicting them is dropping them.

    Only while a tier is nearly full: nothing is written as long as the budget has room. Where a plan says how much will
    have to go to the lowest tier, that may go at once: a drive that rests while the tiers above it fill is
    waited for later. Sums are left alone: they change, so a copy would be wasted.
    """

    def __init__(self, transfer: Transfer, demotion: Demotion, timeout_s: float) -> None:
        self._transfer = transfer
        self._books = transfer.books
        self._demotion = demotion
        self._timeout_s = timeout_s
        self._running = [False] * len(transfer.books.tiers)
        self._rest_until_s = [0.0] * len(transfer.books.tiers)
        self._pause_s = [_PAUSES_S[0]] * len(transfer.books.tiers)

    def poke(self, level: int) -> None:
        """A page entered the tier; starts cleaning when the tier is nearly full. The lock is held."""
        books = self._books
        if level >= books.last or self._running[level] or self._short_bytes(level) <= 0:
            return
        if books.clock.now() < self._rest_until_s[level]:
            return
        self._running[level] = self._transfer.threads.submit(lambda: self._run(level), up=False)

    def _short_bytes(self, level: int) -> int:
        """Bytes of the next victims that should be clean: what free room lacks to be the headroom, or more by plan."""
        books = self._books
        tiers = books.tiers[: level + 1]
        short = tiers[level].capacity_bytes // _HEADROOM - books.free_bytes(level)
        if level < books.last - 1:
            return short
        above_bytes = sum(tier.capacity_bytes for tier in tiers)
        return max(short, books.bytes_to_leave(above_bytes, sum(tier.used_bytes for tier in tiers)))

    def _run(self, level: int) -> None:
        books = self._books
        while True:
            with books.changed:
                entry = self._claim(level)
                if entry is None:
                    self._running[level] = False
                    return
            deadline = books.clock.now() + self._timeout_s
            if self._demotion.clean(entry, level, deadline):
                self._pause_s[level] = _PAUSES_S[0]
                continue
            with books.changed:
                self._running[level] = False
                self._rest_until_s[level] = books.clock.now() + self._pause_s[level]
                self._pause_s[level] = min(2 * self._pause_s[level], _PAUSES_S[1])
            return

    def _claim(self, level: int) -> Entry | None:
        """Pins the first of the next victims that has no other copy."""
        books = self._books
        short = self._short_bytes(level)
        if books.closed or short <= 0:
            return None
        # A policy names victims of all the bytes that it is asked for, or none: so it is asked for few first.
        need, seen = max(1, books.tiers[level].capacity_bytes // _FIRST_LOOK), 0
        while True:
            victims = books.policies[level].victims(min(need, short))
            for number in victims[seen:]:
                entry: Entry | None = books.by_id[number]
                place = entry.valid_place(level) if entry is not None else None
                if entry is not None and place is not None and self._is_worth_it(entry, place, level):
                    books.pin(entry, place, level, copy=True)
                    return entry
            if need >= short or not victims:
                return None
            need, seen = 2 * need, len(victims)

    def _is_worth_it(self, entry: Entry, place: Place, level: int) -> bool:
        return not (
            entry.is_sum
            or entry.busy
            or entry.dead
            or not entry.visible
            or place.pins
            or entry.has_other_copy(level)
            or self._books.is_cheaper_again(entry, level)
        )
