"""What resident storages take of the store's device budget."""

from __future__ import annotations

from tiercache.store import TierStore
from tiercache.tiers.base import Slot

# Loans come in steps, so that most storages cost no call.
_SMALLEST_SHARE = 16
_LARGEST_STEP_BYTES = 16 << 20
# Of a budget that turns out too small, the share that stays resident; the rest is for pages on their way.
_RESIDENT_SHARE = 0.75


class Loan:
    """The part of the device budget that storages outside the store may take up.

    It grows with them until the device is full. From then on it is smaller, for good: pages on their way down and up
    need room too. The session's lock guards it.

    Args:
        store: whose device tier lends.
        limit_bytes: the most that it may be; None for all there is.

    Attributes:
        lent_bytes: what the device tier lent.
        limit_bytes: what may be resident.
        overshoot_bytes: most bytes that were resident beyond the loan: what had to be here, but did not fit.
    """

    def __init__(self, store: TierStore, limit_bytes: int | None) -> None:
        self._store = store
        self._is_auto = limit_bytes is None
        device_bytes = store.config.device_bytes
        self.limit_bytes = device_bytes if limit_bytes is None else limit_bytes
        self.overshoot_bytes = 0
        self._step_bytes = max(1, min(_LARGEST_STEP_BYTES, device_bytes // _SMALLEST_SHARE))
        self._slots: list[Slot] = []
        self.lent_bytes = 0

    def fit(self, used_bytes: int) -> None:
        """Makes the loan what `used_bytes` need; where the device has no room for that, the limit comes down."""
        missing_bytes = min(used_bytes, self.limit_bytes) - self.lent_bytes
        if missing_bytes > 0:
            self._grow(missing_bytes)
        if used_bytes > self.lent_bytes:
            share = _RESIDENT_SHARE if self._is_auto else 1.0
            self.limit_bytes = min(self.limit_bytes, int(self.lent_bytes * share))
            self._is_auto = False

    def cover(self, used_bytes: int) -> int:
        """Makes the loan what `used_bytes` need, limit or not; returns the bytes that no free room is found for."""
        if used_bytes > self.lent_bytes:
            self._grow(used_bytes - self.lent_bytes)
        return max(0, used_bytes - self.lent_bytes)

    def add(self, slot: Slot | None, used_bytes: int) -> None:
        """Adds room that was evicted for the loan, if any."""
        if slot is not None:
            self._slots.append(slot)
            self.lent_bytes += slot.num_bytes
        self.overshoot_bytes = max(self.overshoot_bytes, used_bytes - self.lent_bytes)

    def _grow(self, need_bytes: int) -> None:
        steps = -(-need_bytes // self._step_bytes)
        for num_bytes in (steps * self._step_bytes, need_bytes):
            slot = self._store.lend(num_bytes)
            if slot is not None:
                self._slots.append(slot)
                self.lent_bytes += num_bytes
                return

    def shrink(self, used_bytes: int) -> None:
        """Gives back what is not needed. Never waits."""
        while self._slots and self.lent_bytes - self._slots[-1].num_bytes >= used_bytes:
            slot = self._slots.pop()
            self.lent_bytes -= slot.num_bytes
            self._store.end_loan(slot)
