"""Making room in a tier: who must go, who can simply be dropped, and when to wait."""

from __future__ import annotations

import threading
from collections.abc import Callable

from tiercache.entry import Entry, Place
from tiercache.errors import TierFullError
from tiercache.payload import is_addressable
from tiercache.placement import Books

_LOOKS_AT = 64  # times what is needed, of the next victims, for pages that can go without a write


class Room:
    """Reserves room in a tier, evicting what its policy names.

    A copy that lies elsewhere too is dropped; any other victim is first copied down by the thread that needs the
    room, unless a worker is at it already. So room is made as deep as needed without one thread ever waiting
    for a queue.

    Args:
        books: whose lock is not held by callers of `acquire`.
        demote: copies a pinned victim down and ends its place; runs outside the lock.
    """

    def __init__(self, books: Books, demote: Callable[[Entry, int, float], None]) -> None:
        self._books = books
        self._demote = demote

    def acquire(self, level: int, num_bytes: int, what: str, deadline: float) -> Place:
        """Room for `num_bytes`, reserved and to be filled or released by the caller.

        Raises:
            TierFullError: no eviction can make that room.
            StoreTimeoutError: others were still at work at the deadline.
        """
        books = self._books
        while True:
            with books.changed:
                books.check_open()
                place = books.reserve(level, num_bytes)
                if place is not None:
                    return place
                if num_bytes > books.tiers[level].capacity_bytes:
                    raise self.full(level, num_bytes, what)
                victim = self._choose(level, num_bytes)
                if victim is None and self._may_change(level):
                    books.wait(deadline, what)
                    continue
                if isinstance(victim, int):
                    continue
            if victim is None:
                if not self.let_give_way(level, num_bytes, deadline):
                    raise self.full(level, num_bytes, what)
                continue
            try:
                self._demote(victim, level, deadline)
            except TierFullError:
                # Nothing below can take it. A copy that write-behind made, or is about to finish, can go.
                with books.changed:
                    if self._drop_a_spare(level):
                        continue
                    if not self._may_change(level):
                        raise
                    books.wait(deadline, what)

    def let_give_way(self, level: int, num_bytes: int, deadline: float) -> bool:
        """Room from records of the tier that no page needs, for a reserve after this; the lock is not held."""
        left_s = deadline - self._books.clock.now()
        return left_s > 0 and self._books.tiers[level].make_room(num_bytes or 1, left_s)

    def acquire_at_once(self, level: int, num_bytes: int, not_before: int | None = None) -> Place | None:
        """Room that is free or that dropping copies gives, or None; the lock is held.

        `not_before`: only copies whose next use in the plan is later may be dropped.
        """
        books = self._books
        place = books.reserve(level, num_bytes)
        if place is not None or num_bytes > books.tiers[level].capacity_bytes:
            return place
        chosen = self._victims(level, num_bytes)
        if not chosen:
            return None
        for entry in chosen:
            copy = entry.places[level]
            if copy is None or copy.pins or copy.ahead or not self._is_spare(entry, level):
                return None
            when = books.next_use(entry.key)
            if not_before is not None and when is not None and when <= not_before:
                return None
        for entry in chosen:
            books.vacate(entry, level, self._spare_level(entry, level))
        return books.reserve(level, num_bytes)

    def acquire_behind(self, level: int, num_bytes: int) -> Place | None:
        """Room that is free or that dropping copies with another one below gives, or None; the lock is held.

        For write-behind: a copy whose page otherwise lies further up only is what write-behind made. Dropping it for
        the next one would undo that work, and two pages could push each other out for ever.
        """
        books = self._books
        place = books.reserve(level, num_bytes)
        if place is not None or level == books.last:
            return place
        chosen = self._victims(level, num_bytes)
        for entry in chosen:
            copy = entry.places[level]
            if copy is None or copy.pins or entry.busy or not entry.has_copy_below(level):
                return None
        for entry in chosen:
            books.vacate(entry, level, self._spare_level(entry, level))
        return books.reserve(level, num_bytes)

    def full(self, level: int, num_bytes: int, what: str) -> TierFullError:
        """The error that says need, have and remedy."""
        tier = self._books.tiers[level]
        leased = sum(
            place.slot.num_bytes
            for entry in self._books.by_id
            if entry is not None and (place := entry.places[level]) is not None and place.pins
        )
        free = tier.capacity_bytes - tier.used_bytes
        return TierFullError(
            f"{what}: no room in the {tier.name} tier",
            got=f"need {num_bytes} bytes",
            limit=f"have {free} free of {tier.capacity_bytes}, {leased} of them in use by leases or copies",
            remedy=f"raise the budget of {tier.name}, discard pages or end leases",
        )

    def _choose(self, level: int, num_bytes: int) -> Entry | int | None:
        """Drops spare victims and says how many, or pins one that must be copied down first."""
        books = self._books
        dropped, loaded = 0, None
        for entry in self._victims(level, num_bytes):
            place = entry.places[level]
            if place is None or not place.valid or place.pins or entry.busy:
                continue
            if self._is_spare(entry, level):
                books.vacate(entry, level, self._spare_level(entry, level))
                dropped += 1
            elif (
                not entry.busy
                and entry.visible
                and entry.rise is None
                and books.is_cheaper_again(entry, level)
            ):
                books.bury(entry)
                books.counts.dropped += 1
                dropped += 1
            elif loaded is None:
                loaded = entry
        if not dropped and loaded is not None and self._drop_instead(level, loaded, num_bytes):
            dropped = 1
        if dropped:
            return dropped
        if loaded is not None:
            place = loaded.places[level]
            assert place is not None
            books.pin(loaded, place, level, copy=True)
        return loaded

    def _drop_instead(self, level: int, loaded: Entry, num_bytes: int) -> bool:
        """Drops copies in place of a victim that would have to be written to the drive; False when none can go.

        A page that lies on the drive already costs one transfer and the victim two, so its next use may be half as far
        away. One that lies further up and is used before the victim stays there, and costs none.
        """
        books = self._books
        policy, far = books.policies[level], books.distance(loaded.key)
        if policy is None or far is None or level + 1 < books.last or is_addressable(books.tiers[books.last]):
            return False
        if not policy.oracle:  # being asked for more than has to go changes what others choose
            return False
        dropped = False
        for number in policy.victims(min(books.tiers[level].used_bytes, _LOOKS_AT * max(1, num_bytes))):
            entry: Entry | None = books.by_id[number]
            if entry is None or (place := entry.valid_place(level)) is None or place.pins or place.ahead:
                continue
            distance = books.distance(entry.key)
            if distance is None or not self._is_spare(entry, level):
                continue
            if distance < far if not entry.has_copy_below(level) else 2 * distance >= far:
                books.vacate(entry, level, self._spare_level(entry, level))
                dropped = True
                if books.free_bytes(level) >= num_bytes:
                    break
        return dropped

    def _drop_a_spare(self, level: int) -> bool:
        """Ends one copy of a page that lies elsewhere too; False when there is none."""
        for entry in self._books.by_id:
            if entry is None or (place := entry.valid_place(level)) is None or place.pins:
                continue
            if self._is_spare(entry, level):
                self._books.vacate(entry, level, self._spare_level(entry, level))
                return True
        return False

    def _victims(self, level: int, num_bytes: int) -> list[Entry]:
        books = self._books
        need = max(1, num_bytes - books.free_bytes(level))
        policy = books.policies[level]
        if policy is not None:
            return [entry for k in policy.victims(need) if (entry := books.by_id[k]) is not None]
        # The lowest tier has nowhere to evict to: only copies that lie further up as well can go.
        found: list[Entry] = []
        for entry in books.by_id:
            if need <= 0:
                break
            if entry is None or (place := entry.valid_place(level)) is None or place.pins:
                continue
            if self._is_spare(entry, level):
                found.append(entry)
                need -= place.slot.num_bytes
        return found

    def _is_spare(self, entry: Entry, level: int) -> bool:
        """Whether the copy can go without a write. A device copy only counts copies further down."""
        return entry.has_other_copy(level) and not entry.busy

    def _spare_level(self, entry: Entry, level: int) -> int:
        for lower in range(level + 1, len(entry.places)):
            if entry.valid_place(lower) is not None:
                return lower
        return -1

    def _may_change(self, level: int) -> bool:
        """Whether waiting can help: copies and changes in progress, or leases of other threads."""
        books = self._books
        if books.transient[level] > 0:
            return True
        if level > 0:
            return False
        # A page that is being changed on the device is so for a moment; further down it may wait for staging.
        if any(entry is not None and entry.busy and entry.places[0] is not None for entry in books.by_id):
            return True
        return books.foreign_leases(threading.get_ident())
