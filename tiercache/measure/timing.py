"""Repeating a piece of work until its time is known, alone and beside arithmetic."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

Work = Callable[[], None]


@dataclass(frozen=True, slots=True)
class Budget:
    """How long one figure may take: at least `min_repeats` times, then until `seconds` are over."""

    seconds: float = 0.3
    min_repeats: int = 3


def time_of(work: Work, budget: Budget) -> float:
    """Median seconds of one run of `work`, which returns when it is done; the first run is not counted."""
    work()
    times: list[float] = []
    end = time.perf_counter() + budget.seconds
    while len(times) < budget.min_repeats or time.perf_counter() < end:
        begin = time.perf_counter()
        work()
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def beside(work: Work, arithmetic: Work, budget: Budget) -> tuple[float, float]:
    """Shares of their speed that `work` and `arithmetic` keep when they run at once.

    `work` repeats on a thread of its own, as a store's transfers do, while this thread repeats `arithmetic`.
    """
    alone = time_of(work, budget), time_of(arithmetic, budget)
    begun, done = threading.Event(), threading.Event()
    times: list[float] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            begun.set()
            while not done.is_set() or not times:
                begin = time.perf_counter()
                work()
                times.append(time.perf_counter() - begin)
        except BaseException as error:  # raised where the caller waits
            errors.append(error)

    thread = threading.Thread(target=run, name="tiercache-measure", daemon=True)
    thread.start()
    begun.wait()
    try:
        together = time_of(arithmetic, Budget(max(budget.seconds, 2 * alone[0]), budget.min_repeats))
    finally:
        done.set()
        thread.join()
    if errors:
        raise errors[0]
    return min(1.0, alone[0] / statistics.median(times)), min(1.0, alone[1] / together)
