"""Time that stands still until a test, or a wait, moves it."""

from __future__ import annotations

import threading

from tiercache.clock import Clock


class FakeClock(Clock):
    """Every wait that is not notified at once passes at once, and the time with it."""

    def __init__(self) -> None:
        self._now_s = 0.0

    def now(self) -> float:
        """Seconds that waits, sleeps and `advance` have added up to."""
        return self._now_s

    def advance(self, seconds: float) -> None:
        """Lets that time pass."""
        self._now_s += seconds

    def wait(self, condition: threading.Condition, timeout_s: float) -> None:
        """Gives other threads a moment; when none notified, the whole wait has passed."""
        if not condition.wait(0.05):
            self._now_s += timeout_s

    def sleep(self, seconds: float) -> None:
        """Passes at once."""
        self._now_s += seconds
