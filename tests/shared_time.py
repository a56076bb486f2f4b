"""Time that passes only while all who could use it wait: what runs beside what, however slow the machine is."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from tiercache.clock import Clock

_GIVE_UP_S = 60.0  # of real time, for a test that would hang


class SharedTime(Clock):
    """The thread that makes this computes and uses the store; one thread of the store transfers.

    Attributes:
        quiet: whether the store has no transfer to make. Asked while nobody transfers.
    """

    def __init__(self) -> None:
        self.quiet: Callable[[], bool] = lambda: True
        self._now_s = 0.0
        self._changed = threading.Condition()
        self._computes = threading.get_ident()
        self._waits_for_store = False
        self._transfer_ends_s: float | None = None

    def now(self) -> float:
        return self._now_s

    def wait(self, condition: threading.Condition, timeout_s: float) -> None:
        """The store's own waits: of the thread that computes, they let a transfer's time pass."""
        del timeout_s
        if threading.get_ident() == self._computes:
            self._say(waits=True)
        condition.wait(0.01)
        if threading.get_ident() == self._computes:
            self._say(waits=False)

    def _say(self, *, waits: bool) -> None:
        with self._changed:
            self._waits_for_store = waits
            self._changed.notify_all()

    def sleep(self, seconds: float) -> None:
        """Of somebody who looks again and again: no time of the run."""
        del seconds
        time.sleep(1e-4)

    def transfer(self, seconds: float) -> None:
        """Lasts until so much time has passed in the other thread, in computing or in waiting for the store."""
        if threading.get_ident() == self._computes:  # it fetches for itself
            with self._changed:
                self._now_s += seconds
                self._changed.notify_all()
            return
        with self._changed:
            self._transfer_ends_s = self._now_s + seconds
            self._changed.notify_all()
            give_up = time.monotonic() + _GIVE_UP_S
            while self._now_s < self._transfer_ends_s:
                assert time.monotonic() < give_up
                if self._waits_for_store:
                    self._now_s = self._transfer_ends_s
                else:
                    self._changed.wait(0.01)
            self._transfer_ends_s = None
            self._changed.notify_all()

    def compute(self, seconds: float) -> None:
        """Lets so much time pass, and with it every transfer that fits. What is due at its end has begun."""
        ends_s = self._now_s + seconds
        give_up = time.monotonic() + _GIVE_UP_S
        with self._changed:
            while True:
                assert time.monotonic() < give_up
                pending_s = self._transfer_ends_s
                under_way = pending_s is not None and pending_s > self._now_s
                if (under_way or (pending_s is None and self.quiet())) and self._now_s == ends_s:
                    return
                if under_way:
                    self._now_s = min(ends_s, pending_s)
                    self._changed.notify_all()
                elif pending_s is None and self.quiet():
                    self._now_s = ends_s
                else:
                    self._changed.wait(1e-4)
