"""What the store does with every access: notes it for the plan, the trace and records, and brings pages up ahead."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from tiercache.entry import Entry, PageKey
from tiercache.errors import StoreTimeoutError, TierCacheError
from tiercache.follow import Follower, reserve_rise
from tiercache.plan import AccessPlan, Operation
from tiercache.promote import Promotion
from tiercache.room import Room
from tiercache.trace import AccessTrace
from tiercache.transfer import Transfer

Record = list[tuple[Operation, PageKey]]


class Accesses:
    """The accesses of one store: those that were made, and those that its plan says come.

    All but `record` run under the store's lock; what they bring up, worker threads carry out.

    Attributes:
        watched: somebody wants `note` to be called.
        num_plans: that were followed, none among them.
    """

    def __init__(
        self,
        transfer: Transfer,
        room: Room,
        promotion: Promotion,
        trace: AccessTrace | None,
        start_s: float,
        timeout_s: float,
    ) -> None:
        self._books = transfer.books
        self._room = room
        self._promotion = promotion
        self._threads = transfer.threads
        self._trace = trace
        self._start_s = start_s
        self._timeout_s = timeout_s
        self._follower = Follower(None)
        self.num_plans = 0
        self._records: list[Record] = []
        self.watched = trace is not None
        if trace is not None:
            self._books.on_bury = self._trace_end

    def next_use(self, key: PageKey) -> int | None:
        """Position of the next planned use of the page's bytes; None: never, as far as is known."""
        return self._follower.next_use(key)

    def distance(self, key: PageKey) -> float | None:
        """How far away the page's next use is in the plan: `Follower.distance`."""
        return self._follower.distance(key)

    def recompute_s(self, key: PageKey) -> float | None:
        """Seconds to compute a page again, as the plan says; None for one that must be kept."""
        return self._follower.recompute_s(key)

    def note(self, operation: Operation, key: PageKey, entry: Entry | None, num_bytes: int = 0) -> None:
        """An access was made; `entry` is the page's, if there is one, and else `num_bytes` is what it will have."""
        for record in self._records:
            record.append((operation, key))
        if self._trace is not None and operation != "discard":  # a page with references left is not gone
            shared = operation == "take" and entry is not None and entry.refs > 1
            size = entry.num_bytes if entry is not None else num_bytes
            self._write("read" if shared else operation, key, size, entry)
        if self._follower.active:
            # Look-ahead first: until this access is noted, its page counts as needed now and makes no room.
            self._raise_later(self._follower.look_ahead(self._books, self._room))
            self._follower.note(operation, key, self._books)

    def _trace_end(self, entry: Entry) -> None:
        self._write("discard", entry.key, entry.num_bytes, entry)

    def _write(self, operation: Operation, key: PageKey, num_bytes: int, entry: Entry | None) -> None:
        assert self._trace is not None
        level = entry.source() if entry is not None else None
        tier = self._books.tiers[level].name if level is not None else ""
        self._trace.add(self._books.clock.now() - self._start_s, key, operation, num_bytes, tier)

    @contextmanager
    def record(self) -> Iterator[Record]:
        """Collects (operation, key) of every access made inside the block, in order."""
        record: Record = []
        with self._books.changed:
            self._records.append(record)
            self.watched = True
        try:
            yield record
        finally:
            with self._books.changed:
                self._records = [other for other in self._records if other is not record]

    def bytes_to_leave(self, above_bytes: int) -> int:
        """By how much the plan will overflow the upper tiers: `Follower.bytes_to_leave`."""
        return self._follower.bytes_to_leave(above_bytes)

    def use_when_fullest(self, key: PageKey) -> float | None:
        """When the page is used once the plan holds most: `Follower.use_when_fullest`."""
        return self._follower.use_when_fullest(key)

    def follow(self, plan: AccessPlan | None) -> None:
        """Makes a plan's accesses the known future; None ends that."""
        self._follower = Follower(plan)
        self.num_plans += 1
        self._follower.begin(self._books)
        self.watched = self._trace is not None or bool(self._records) or self._follower.active
        if self._follower.active:
            self._raise_later(self._follower.look_ahead(self._books, self._room))

    def prefetch(self, keys: Iterable[PageKey]) -> None:
        """Brings pages up to the device as far as there is room without a write."""
        rising = []
        for key in keys:
            entry = self._books.table.get(key)
            if entry is None or not entry.visible or entry.busy or entry.rise is not None:
                continue
            if entry.source() in (None, 0):
                continue
            if not reserve_rise(entry, 0, self._room):
                break
            rising.append(entry)
        self._raise_later(rising)

    def _raise_later(self, entries: list[Entry]) -> None:
        for entry in entries:
            rise = entry.rise
            assert rise is not None
            if not self._threads.submit(lambda entry=entry: self._carry_up(entry), up=True):  # type: ignore[misc]
                self._books.abandon(entry, rise, StoreTimeoutError("prefetch: the store is closing"))

    def _carry_up(self, entry: Entry) -> None:
        books = self._books
        with books.changed:
            rise = entry.rise
            if rise is None or rise.started or books.closed:
                return
            rise.started = True
        try:
            self._promotion.lift(entry, rise, books.clock.now() + self._timeout_s, keep=False)
        except (TierCacheError, OSError):
            return  # whoever waits for the page finds the error in the rise
        with books.changed:
            books.counts.prefetches += 1
