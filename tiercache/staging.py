"""Staging: host memory with a budget of its own, for bytes that are on their way."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

import numpy as np

from tiercache.clock import Clock
from tiercache.errors import StoreTimeoutError, TierFullError
from tiercache.tiers.base import ByteArray
from tiercache.tiers.host import HostTier

# Parts of one loan start at multiples of this, the first one at a 4 KiB boundary unless it is smaller.
_ALIGN_BYTES = 64
# Seconds after which who waits for room looks whether a copy can be ended meanwhile.
_LOOK_S = 0.02


class Staging:
    """Lends host memory for the time of one copy: payloads on their way, and what codecs write to or decode into.

    Implementation notes. Borrowers wait for each other, so an order keeps them from waiting in a circle: room on
    the device comes before staging, staging before room and pins in the tiers below it, and nobody borrows twice
    at a time. A borrower then only waits for borrowers that go on by themselves. Copies that have been started on
    a device hold pins until a worker gets round to ending them: whoever waits here ends them meanwhile.

    Args:
        tier: whose staging part is lent.
        clock: time.
        help_on: ends one copy that has been started, if there is one.

    Attributes:
        capacity_bytes: all there is to lend.
        peak_bytes: most that was lent at any instant.
    """

    def __init__(self, tier: HostTier, clock: Clock, help_on: Callable[[], None]) -> None:
        self._tier = tier
        self._clock = clock
        self._help_on = help_on
        self._freed = threading.Condition(threading.Lock())
        self.capacity_bytes = int(tier.stats().staging_bytes)
        self.peak_bytes = 0

    @property
    def used_bytes(self) -> int:
        """What is lent now, in whole 4 KiB pages."""
        return self._tier.staging_used_bytes

    def usage(self) -> tuple[int, int]:
        """What is lent now and the most that ever was, as of one moment."""
        with self._freed:
            return self.used_bytes, self.peak_bytes

    def fits(self, sizes: Sequence[int]) -> bool:
        """Whether parts of these sizes can be had together at all."""
        return sum(map(_aligned, sizes)) <= self.capacity_bytes

    @contextmanager
    def borrow(self, sizes: Sequence[int], deadline: float, what: str) -> Iterator[list[ByteArray]]:
        """Memory of these sizes, uninitialised, for the block; waits until others give theirs back.

        Raises:
            TierFullError: more than there is.
            StoreTimeoutError: others held it until the deadline.
        """
        total = sum(map(_aligned, sizes))
        if total == 0:
            yield [np.empty(0, np.uint8) for _ in sizes]
            return
        if total > self.capacity_bytes:
            raise TierFullError(
                f"{what}: staging is too small for a copy of this page",
                got=f"need {total} bytes",
                limit=f"have {self.capacity_bytes}",
                remedy="raise staging, or make pages smaller",
            )
        with ExitStack() as stack:
            stack.callback(self._notify)
            memory = self._wait_for(total, stack, deadline, what)
            parts, begin = [], 0
            for size in sizes:
                parts.append(memory[begin : begin + size])
                begin += _aligned(size)
            yield parts

    def _wait_for(self, total: int, stack: ExitStack, deadline: float, what: str) -> ByteArray:
        while True:
            with self._freed:
                try:
                    memory: ByteArray = stack.enter_context(self._tier.staging(total, 0.0))
                except TierFullError:
                    left_s = deadline - self._clock.now()
                    if left_s <= 0:
                        raise StoreTimeoutError(
                            f"{what}: other copies held the staging memory until the deadline",
                            got=f"need {total} bytes",
                            limit=f"{self.used_bytes} of {self.capacity_bytes} in use",
                            remedy="raise staging or timeout_s",
                        ) from None
                    self._clock.wait(self._freed, min(left_s, _LOOK_S))
                else:
                    self.peak_bytes = max(self.peak_bytes, self.used_bytes)
                    return memory
            self._help_on()

    def close(self) -> None:
        """Gives the memory back once no part of it is lent."""
        self._tier.close()

    def _notify(self) -> None:
        with self._freed:
            self._freed.notify_all()


def _aligned(size: int) -> int:
    return -(-size // _ALIGN_BYTES) * _ALIGN_BYTES
