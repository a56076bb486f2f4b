"""Following an access plan: when each page is used next, and what to bring up before it is."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from math import inf

from tiercache.entry import Entry, PageKey, Rise
from tiercache.placement import Books
from tiercache.plan import Access, AccessPlan, Operation
from tiercache.room import Room

# A stray access moves the run on if it is so near in the plan, if the access before it says so, or after so many.
_NEAR = 2
_WINDOW = 64
_MAX_STRAYS = 16
# Look-ahead fills half of the device: the other half is for what is in use and what is put.
_AHEAD_SHARE = 2
_RETRY = 2


class Follower:
    """The plan that the store follows, and how far the run is in it. All under the store's lock.

    An access that is not the plan's next one is a deviation: it is counted, and the run is taken to be where the
    plan has that access next, unless that is far away.

    Attributes:
        active: there is a plan.
    """

    def __init__(self, plan: AccessPlan | None) -> None:
        self._accesses: list[Access] = list(plan.accesses) if plan is not None else []
        self._uses: dict[PageKey, list[int]] = {}
        self._at: dict[tuple[Operation, PageKey], list[int]] = {}
        self._cursor = 0
        self._num_strays = 0
        self._stray: tuple[Operation, PageKey] | None = None
        self._ahead = 0
        self._window: deque[tuple[int, int]] = deque()
        self._window_bytes = 0
        self._retry_at = 0
        self._recompute_s: dict[PageKey, float] = {}
        self.active = plan is not None
        self._ends: dict[PageKey, list[int]] = {}
        self._live_bytes = [0, *plan.live_bytes()] if plan is not None else [0]
        self._fullest = _fullest_from(self._live_bytes)
        for position, access in enumerate(self._accesses):
            self._at.setdefault((access.operation, access.key), []).append(position)
            if access.operation in ("read", "accumulate", "take"):
                self._uses.setdefault(access.key, []).append(position)
            if access.operation in ("take", "discard"):
                self._ends.setdefault(access.key, []).append(position)
            if access.recompute_s is not None:
                self._recompute_s[access.key] = access.recompute_s

    def recompute_s(self, key: PageKey) -> float | None:
        """Seconds to compute a page again; None for one that must be kept."""
        return self._recompute_s.get(key)

    def bytes_to_leave(self, above_bytes: int) -> int:
        """Bytes of pages that the plan will have pushed out of tiers that hold `above_bytes`."""
        return max(0, self._live_bytes[self._fullest[self._cursor]] - above_bytes)

    def use_when_fullest(self, key: PageKey) -> float | None:
        """Position of the page's first use once the plan holds most from here on, inf without one; None: it is gone by
        then, so its room is worth nothing.
        """
        fullest = self._fullest[self._cursor]
        ends = self._ends.get(key, [])
        index = bisect_left(ends, self._cursor)
        if index < len(ends) and ends[index] < fullest:
            return None
        uses = self._uses.get(key, [])
        index = bisect_left(uses, fullest)
        return uses[index] if index < len(uses) else inf

    def begin(self, books: Books) -> None:
        """Tells the policies this plan's next uses in place of another's."""
        for policy in books.policies:
            if policy is not None:
                policy.advance(0)
        for entry in books.by_id:
            if entry is not None:
                self._tell(entry, books)

    def next_use(self, key: PageKey) -> int | None:
        """Position of the next planned use of the page's bytes; None: never, as far as is known."""
        uses = self._uses.get(key)
        if uses is None:
            return None
        index = bisect_left(uses, self._cursor)
        return uses[index] if index < len(uses) else None

    def distance(self, key: PageKey) -> float | None:
        """Accesses until the page's next use, inf without one; None without a plan."""
        if not self.active:
            return None
        when = self.next_use(key)
        return inf if when is None else when - self._cursor

    def note(self, operation: Operation, key: PageKey, books: Books) -> None:
        """The run made this access."""
        books.pace.note_access(books.clock.now())
        cursor, accesses = self._cursor, self._accesses
        if cursor < len(accesses):
            access = accesses[cursor]
            if access.operation == operation and (access.key is key or access.key == key):
                self._num_strays = 0
                self._stray = (operation, key)
                self._move_to(cursor + 1, books)
                return
        books.counts.deviations += 1
        previous, self._stray = self._stray, (operation, key)
        positions = self._at.get((operation, key), [])
        later = positions[bisect_left(positions, cursor) :]
        if not later:
            return
        # Of several places where the run may be, the one that the access before this one speaks for.
        near = (at for at in later if 0 < at <= cursor + _WINDOW)
        sure = next((at for at in near if self._is(at - 1, previous)), None)
        found = later[0] if sure is None else sure
        self._num_strays += 1
        if sure is not None or found - cursor <= _NEAR or self._num_strays > _MAX_STRAYS:
            self._num_strays = 0
            self._move_to(found + 1, books)

    def _is(self, position: int, made: tuple[Operation, PageKey] | None) -> bool:
        access = self._accesses[position]
        return made is not None and (access.operation, access.key) == made

    def _move_to(self, cursor: int, books: Books) -> None:
        passed = self._accesses[self._cursor : cursor]
        self._cursor = cursor
        self._ahead = max(self._ahead, cursor)
        while self._window and self._window[0][0] < cursor:
            self._window_bytes -= self._window.popleft()[1]
        for policy in books.policies:
            if policy is not None:
                policy.advance(cursor)
        for access in passed:
            entry = books.table.get(access.key)
            if entry is not None:
                self._tell(entry, books)

    def _tell(self, entry: Entry, books: Books) -> None:
        """Gives the policies the entry's next use."""
        when = self.next_use(entry.key)
        for level, policy in enumerate(books.policies):
            if policy is not None and entry.num_bytes and entry.valid_place(level) is not None:
                policy.set_next_use(entry.id, when)

    def look_ahead(self, books: Books, room: Room) -> list[Entry]:
        """Reserves room for the next pages that the plan needs and that are not where it needs them.

        Returns the entries, each with a rise that a worker should carry out.
        """
        rising: list[Entry] = []
        if self._cursor < self._retry_at:
            return rising
        limit_bytes = books.tiers[0].capacity_bytes // _AHEAD_SHARE
        while self._ahead < len(self._accesses) and self._window_bytes < limit_bytes:
            access = self._accesses[self._ahead]
            entry = books.table.get(access.key)
            if access.operation not in ("read", "accumulate", "take"):
                pass
            elif entry is None:
                # The run has yet to put it: until then it takes its part of the window, or the look-ahead would
                # run off to the end of the plan and never come back for it.
                self._window.append((self._ahead, access.num_bytes))
                self._window_bytes += access.num_bytes
            else:
                level = self._wanted(access, entry, books)
                source = entry.source()
                distance = self._ahead - self._cursor
                if level is not None and not books.pace.is_due(distance, source or 0, limit_bytes):
                    break
                if level is not None and not reserve_rise(entry, level, room, self._ahead):
                    self._retry_at = self._cursor + _RETRY
                    break
                if level is not None:
                    rising.append(entry)
                if level != 1:
                    self._window.append((self._ahead, entry.num_bytes))
                    self._window_bytes += entry.num_bytes
            self._ahead += 1
        return rising

    def _wanted(self, access: Access, entry: Entry, books: Books) -> int | None:
        """The level that the page should come up to before this access; None: it is well where it is."""
        if not entry.visible or entry.busy or entry.dead or entry.rise is not None:
            return None
        source = entry.source()
        if source is None or source == 0:
            return None
        if access.operation == "read" or books.engines.of(entry.device).late:
            return 0 if access.operation != "accumulate" else None
        # A sum that the CPU can add to, or a page that is copied out, is as good in host memory.
        return 1 if source > 1 and access.operation == "accumulate" else (0 if source > 1 else None)


def _fullest_from(live_bytes: list[int]) -> list[int]:
    """For each place in a plan, where from there on it holds most."""
    found, best = [0] * len(live_bytes), len(live_bytes) - 1
    for at in reversed(range(len(live_bytes))):
        if live_bytes[at] >= live_bytes[best]:
            best = at
        found[at] = best
    return found


def reserve_rise(entry: Entry, level: int, room: Room, not_before: int | None = None) -> bool:
    """Reserves room at `level` for a page that lies lower and marks it as rising; False without room."""
    num_bytes = entry.num_bytes
    if level > 0:
        source = entry.source()
        assert source is not None
        below = entry.places[source]
        assert below is not None
        assert below.meta is not None
        num_bytes = below.meta.stored_bytes
    place = room.acquire_at_once(level, num_bytes, not_before)
    if place is None:
        return False
    place.ahead = level == 0
    entry.rise = Rise(level)
    entry.rise.place = place
    return True
