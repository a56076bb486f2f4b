"""Write-behind: pages that will be evicted first are copied down before anybody needs their room."""

from __future__ import annotations

import math
from collections import deque

from tiercache.demote import Demotion
from tiercache.entry import Entry
from tiercache.payload import is_addressable
from tiercache.transfer import Transfer

# The share of a tier that is kept free or clean, and the seconds of rest after a copy that failed.
_HEADROOM = 4
# The share of a tier that must come to it before its pages are looked through for those that a plan pushes out.
_LOOKS = 16
_PAUSES_S = (0.1, 30.0)


class Cleaner:
    """Keeps the next victims of every tier clean, so that evicting them is dropping them.

    Only while a tier is nearly full: nothing is written as long as the budget has room. Where a plan says how much will
    have to go to the drive, that may go at once, what is used last first: a drive that rests while the tiers
    above it fill is waited for later. Sums are left alone: they change, so a copy would be wasted.
    """

    def __init__(self, transfer: Transfer, demotion: Demotion, timeout_s: float) -> None:
        self._transfer = transfer
        self._books = transfer.books
        self._demotion = demotion
        self._timeout_s = timeout_s
        self._running = [False] * len(transfer.books.tiers)
        self._rest_until_s = [0.0] * len(transfer.books.tiers)
        self._pause_s = [_PAUSES_S[0]] * len(transfer.books.tiers)
        self._early: deque[Entry] = deque()
        self._looked_at_bytes = 0

    def poke(self, level: int) -> None:
        """A page entered the tier; starts cleaning when there is something to clean. The lock is held."""
        books = self._books
        if level >= books.last or self._running[level]:
            return
        if self._short_bytes(level) <= 0 and not self._may_go_early(level):
            return
        if books.clock.now() < self._rest_until_s[level]:
            return
        self._running[level] = self._transfer.threads.submit(lambda: self._run(level), up=False)

    def _short_bytes(self, level: int) -> int:
        """Bytes that the free room lacks to be the headroom."""
        return self._books.tiers[level].capacity_bytes // _HEADROOM - self._books.free_bytes(level)

    def _run(self, level: int) -> None:
        books = self._books
        while True:
            with books.changed:
                entry = self._claim(level) or self._claim_early(level)
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
        for number in books.policies[level].victims(short):
            entry: Entry | None = books.by_id[number]
            if entry is not None and self._take_hold(entry, level):
                return entry
        return None

    def _take_hold(self, entry: Entry, level: int) -> bool:
        """Pins a page that has no other copy and is worth one; False when it isn't."""
        books = self._books
        if entry.is_sum or entry.busy or entry.dead or not entry.visible:
            return False
        place = entry.valid_place(level)
        if place is None or place.pins or entry.has_other_copy(level) or books.is_cheaper_again(entry, level):
            return False
        books.pin(entry, place, level, copy=True)
        return True

    # What a plan will push out to the drive

    def _may_go_early(self, level: int) -> bool:
        """Whether pages of the tier above a drive may have to go there that were not looked at yet."""
        books = self._books
        if level != books.last - 1 or is_addressable(books.tiers[books.last]):
            return False
        if not books.bytes_to_leave(sum(tier.capacity_bytes for tier in books.tiers[: level + 1])):
            self._early.clear()
            return False
        tier = books.tiers[level]
        self._looked_at_bytes = min(self._looked_at_bytes, tier.used_bytes)
        return bool(self._early) or tier.used_bytes - self._looked_at_bytes >= tier.capacity_bytes // _LOOKS

    def _claim_early(self, level: int) -> Entry | None:
        if self._books.closed or not self._may_go_early(level):
            return None
        if not self._early:
            self._look(level)
        while self._early:
            entry = self._early.popleft()
            if self._take_hold(entry, level):
                return entry
            place = entry.valid_place(level)
            if place is not None and place.pins:  # still on its way: to be looked at again
                self._looked_at_bytes -= place.slot.num_bytes
        return None

    def _look(self, level: int) -> None:
        """Finds the pages that are used last among as many bytes as have to leave, beyond what left or could."""
        books = self._books
        tier = books.tiers[level]
        self._looked_at_bytes = tier.used_bytes
        here: list[Entry] = []
        stored_bytes = num_bytes = gone_bytes = 0
        for entry in books.by_id:
            if entry is None or entry.dead or (source := entry.source()) is None:
                continue
            place = entry.valid_place(level)
            if place is not None:
                stored_bytes += place.slot.num_bytes
                num_bytes += entry.num_bytes
            if source > level or (place is not None and entry.has_copy_below(level)):
                gone_bytes += entry.num_bytes
            elif place is not None and not entry.is_sum:
                here.append(entry)
        growth = max(1.0, num_bytes / max(1, stored_bytes))  # of what its codec makes of the tier's budget
        above = sum(upper.capacity_bytes for upper in books.tiers[:level]) + growth * tier.capacity_bytes
        short = books.bytes_to_leave(int(above)) - gone_bytes
        uses = {id(entry): books.next_use(entry.key) for entry in here}
        here.sort(key=lambda entry: math.inf if (use := uses[id(entry)]) is None else use, reverse=True)
        for entry in here:
            if short <= 0:
                break
            short -= entry.num_bytes
            self._early.append(entry)
