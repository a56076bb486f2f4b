"""Write-behind: pages that will be evicted first are copied down before anybody needs their room."""

from __future__ import annotations

from tiercache.demote import Demotion
from tiercache.entry import Entry
from tiercache.transfer import Transfer

# The share of a tier that is kept free or clean, and the seconds of rest after a copy that failed.
_HEADROOM = 4
_PAUSES_S = (0.1, 30.0)


class Cleaner:
    """Keeps the next victims of every tier clean, so that evicting them is dropping them.

    Only while a tier is nearly full: nothing is written as long as the budget has room. Sums are left alone:
    they change, so a copy would be wasted.
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
        """Bytes that the free room lacks to be the headroom."""
        return self._books.tiers[level].capacity_bytes // _HEADROOM - self._books.free_bytes(level)

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
        for number in books.policies[level].victims(short):
            entry: Entry | None = books.by_id[number]
            if entry is None or entry.is_sum or entry.busy or entry.dead or not entry.visible:
                continue
            place = entry.valid_place(level)
            if (
                place is None
                or place.pins
                or entry.has_other_copy(level)
                or books.is_cheaper_again(entry, level)
            ):
                continue
            books.pin(entry, place, level, copy=True)
            return entry
        return None
