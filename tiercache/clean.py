"""Write-behind: pages that will be evicted first are copied down before anybody needs their room."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from tiercache.accesses import Accesses
from tiercache.demote import Demotion
from tiercache.entry import Entry
from tiercache.payload import is_addressable
from tiercache.transfer import Transfer

# The share of a tier that is kept free or clean, and the seconds of rest after a copy that failed.
_HEADROOM = 4
# The share of the tiers above a drive that must come to them before their pages are looked through for those that a
# plan pushes out.
_LOOKS = 32
_PAUSES_S = (0.1, 30.0)
Claim = Callable[[], tuple[Entry, int] | None]


class Cleaner:
    """Keeps the next victims of every tier clean, so that evicting them is dropping them.

    Only while a tier is nearly full: nothing is written as long as the budget has room. Where a plan says how much will
    have to go to the drive, that goes at once, what is used last first and from whatever tier it lies in: a drive
    that rests while the tiers above it fill is waited for later. Sums are left alone: they change, so a copy would be
    wasted.
    """

    def __init__(self, transfer: Transfer, demotion: Demotion, accesses: Accesses, timeout_s: float) -> None:
        self._accesses = accesses
        self._transfer = transfer
        self._books = transfer.books
        self._demotion = demotion
        self._timeout_s = timeout_s
        # A lane a tier for its own next victims; the last one's is for what a plan sends there from all above.
        self._running = [False] * len(transfer.books.tiers)
        self._rest_until_s = [0.0] * len(transfer.books.tiers)
        self._pause_s = [_PAUSES_S[0]] * len(transfer.books.tiers)
        self._early: deque[Entry] = deque()
        self._looked_at_bytes = 0
        self._followed = 0

    def poke(self, level: int) -> None:
        """A page entered the tier; starts cleaning when there is something to clean. The lock is held."""
        books = self._books
        if level >= books.last:
            return
        if not self._running[level] and self._short_bytes(level) > 0:
            self._start(level, lambda: self._claim(level))
        if not self._running[books.last] and self._may_go_early():
            self._start(books.last, self._claim_early)

    def _start(self, lane: int, claim: Claim) -> None:
        if self._books.clock.now() >= self._rest_until_s[lane]:
            self._running[lane] = self._transfer.threads.submit(lambda: self._run(lane, claim), up=False)

    def _short_bytes(self, level: int) -> int:
        """Bytes that the free room lacks to be the headroom."""
        return self._books.tiers[level].capacity_bytes // _HEADROOM - self._books.free_bytes(level)

    def _run(self, lane: int, claim: Claim) -> None:
        """Copies what is claimed: of one tier, or, in the lane of the last one, what goes there early."""
        books = self._books
        while True:
            with books.changed:
                claimed = claim()
                if claimed is None:
                    self._running[lane] = False
                    return
            deadline = books.clock.now() + self._timeout_s
            cleaned = self._demotion.clean(*claimed, deadline, to_last=lane == books.last)
            if cleaned:
                self._pause_s[lane] = _PAUSES_S[0]
            if cleaned and lane < books.last:
                continue
            with books.changed:
                self._running[lane] = False
                if cleaned:  # what is clean now can give way; lanes that wait for a thread go first
                    self._rest_until_s[:lane] = [0.0] * lane
                    self._start(lane, claim)
                else:
                    self._rest_until_s[lane] = books.clock.now() + self._pause_s[lane]
                    self._pause_s[lane] = min(2 * self._pause_s[lane], _PAUSES_S[1])
            return

    def _claim(self, level: int) -> tuple[Entry, int] | None:
        """Pins the first of the tier's next victims that has no other copy."""
        books = self._books
        short = self._short_bytes(level)
        if books.closed or short <= 0:
            return None
        for number in books.policies[level].victims(short):
            entry: Entry | None = books.by_id[number]
            if entry is not None and self._take_hold(entry, level):
                return entry, level
        return None

    def _is_soon_gone(self, entry: Entry, level: int) -> bool:
        """Whether a plan discards a page before the tiers above the drive are fullest: a write would be for nothing."""
        return level == self._books.last - 1 and self._accesses.use_when_fullest(entry.key) is None

    def _take_hold(self, entry: Entry, level: int, *, below: bool = False) -> bool:
        """Pins a page that has no other copy, or none `below`, and is worth one; False when it isn't."""
        books = self._books
        if entry.is_sum or entry.busy or entry.dead or not entry.visible:
            return False
        place = entry.valid_place(level)
        copied = entry.has_copy_below(level) if below else entry.has_other_copy(level)
        if place is None or place.pins or copied or books.is_cheaper_again(entry, level):
            return False
        if self._is_soon_gone(entry, level):
            return False
        books.pin(entry, place, level, copy=True)
        return True

    # What a plan will push out to the drive

    def _may_go_early(self) -> bool:
        """Whether pages of the tiers above a drive may have to go there that were not looked at yet."""
        books = self._books
        if not books.last or is_addressable(books.tiers[books.last]):
            return False
        if self._followed != self._accesses.num_plans:  # what was found for another plan
            self._followed = self._accesses.num_plans
            self._early.clear()
            self._looked_at_bytes = 0
        upper = books.tiers[: books.last]
        capacity_bytes = sum(tier.capacity_bytes for tier in upper)
        if not self._accesses.bytes_to_leave(capacity_bytes):
            self._early.clear()
            return False
        used_bytes = sum(tier.used_bytes for tier in upper)
        self._looked_at_bytes = min(self._looked_at_bytes, used_bytes)
        return bool(self._early) or used_bytes - self._looked_at_bytes >= capacity_bytes // _LOOKS

    def _claim_early(self) -> tuple[Entry, int] | None:
        if self._books.closed or not self._may_go_early():
            return None
        if not self._early:
            self._look()
        while self._early:
            entry = self._early.popleft()
            level = next((k for k in reversed(range(self._books.last)) if entry.valid_place(k)), None)
            if level is None:
                continue
            if self._take_hold(entry, level, below=True):
                return entry, level
            place = entry.valid_place(level)
            if place is not None and place.pins:  # in use or on its way: to be looked at again
                self._looked_at_bytes -= place.slot.num_bytes
        return None

    def _look(self) -> None:
        """Finds as many bytes as have to leave, beyond what left, of the pages used last once the plan holds most."""
        books = self._books
        last = books.last
        upper = books.tiers[:last]
        self._looked_at_bytes = sum(tier.used_bytes for tier in upper)
        here: list[tuple[float, Entry]] = []
        stored_bytes = num_bytes = gone_bytes = 0
        for entry in books.by_id:
            if entry is None or entry.dead or (source := entry.source()) is None:
                continue
            above = entry.valid_place(last - 1)
            if above is not None and last > 1:
                stored_bytes += above.slot.num_bytes
                num_bytes += entry.num_bytes
            use = self._accesses.use_when_fullest(entry.key)
            if use is None:
                continue
            if entry.valid_place(last) is not None:
                gone_bytes += entry.num_bytes
            elif source < last and not entry.is_sum:
                here.append((use, entry))
        growth = max(1.0, num_bytes / max(1, stored_bytes))  # of what its codec makes of the host's budget
        room = [tier.capacity_bytes for tier in upper]
        short = self._accesses.bytes_to_leave(int(sum(room[:-1]) + growth * room[-1])) - gone_bytes
        for _, entry in sorted(here, key=lambda found: found[0], reverse=True):
            if short <= 0:
                break
            short -= entry.num_bytes
            self._early.append(entry)
