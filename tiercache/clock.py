"""Time as the store sees it, so that tests can hold it still."""

from __future__ import annotations

import threading
import time


class Clock:
    """Monotonic time in seconds, and waits that end by it."""

    def now(self) -> float:
        """Seconds since some fixed instant."""
        return time.monotonic()

    def wait(self, condition: threading.Condition, timeout_s: float) -> None:
        """Waits for a notification of `condition`, whose lock the caller holds, for `timeout_s` at most."""
        condition.wait(timeout_s)

    def sleep(self, seconds: float) -> None:
        """Lets that time pass."""
        time.sleep(seconds)
