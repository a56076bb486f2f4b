"""The store's lock, and waiting under it."""

from __future__ import annotations

import threading

from tiercache.clock import Clock
from tiercache.errors import StoreClosedError, StoreTimeoutError

_LATE_S = 1.0  # behind a deadline that nobody wakes up for unless the process was stopped
_MOMENT_S = 5.0


class Monitor:
    """One lock, a condition that tells of changes, and whether all is over.

    Attributes:
        changed: the lock, and the condition that is notified when room or a page came free.
        clock: time.
        closed: after close.
        lease_owners: leases in force by the thread that holds them: no use for it to wait for those.
    """

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.changed = threading.Condition(threading.Lock())
        self.closed = False
        self.lease_owners: dict[int, int] = {}
        self._waiting = 0

    def check_open(self) -> None:
        """Raises StoreClosedError after close."""
        if self.closed:
            raise StoreClosedError("the store is closed", remedy="open another")

    def notify(self) -> None:
        """Wakes those who wait for a change."""
        if self._waiting or self.closed:
            self.changed.notify_all()

    def wait(self, deadline: float, what: str) -> None:
        """Waits for a change. Raises StoreTimeoutError at the deadline and StoreClosedError when closed."""
        left_s = deadline - self.clock.now()
        if left_s <= 0:
            raise StoreTimeoutError(
                f"{what}: waited until the deadline", remedy="raise timeout_s, or end leases of other threads"
            )
        self._waiting += 1
        try:
            self.clock.wait(self.changed, left_s)
            if self.clock.now() > deadline + _LATE_S:
                # The process was stopped (Ctrl-Z), and so was whoever would have notified.
                self.clock.wait(self.changed, _MOMENT_S)
        finally:
            self._waiting -= 1
        self.check_open()

    def foreign_leases(self, thread: int) -> bool:
        """Whether other threads hold leases, which may end."""
        return len(self.lease_owners) > (1 if thread in self.lease_owners else 0)
