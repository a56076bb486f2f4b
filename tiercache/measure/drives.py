"""Drives, through the disk tier: records with headers and checksums, past the kernel's cache where that can be done."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from tiercache.measure.copies import PAGE_BYTES, SMALL_BYTES, page_meta, speed_of
from tiercache.measure.timing import Budget, Work
from tiercache.profile import TierSpeed
from tiercache.tiers.base import Slot
from tiercache.tiers.disk import DiskTier

_PAGES = 16  # of a round: more than what a drive's own cache makes look fast
_THREADS = 4


class _Round:
    """Pages written and read by several threads at once, as a store's transfers do."""

    def __init__(self, tier: DiskTier, num_bytes: int, num_pages: int) -> None:
        self._tier, self._num_bytes = tier, num_bytes
        self._data = np.random.default_rng(0).integers(0, 256, num_bytes, np.uint8)
        self._slots: list[Slot] = []
        self._num_pages = num_pages
        self._pool = ThreadPoolExecutor(_THREADS, "tiercache-measure")
        self._buffers = threading.local()

    def write(self) -> None:
        """Writes every page anew."""
        for slot in self._slots:
            self._tier.free(slot)
        self._slots = [self._tier.reserve(self._num_bytes) for _ in range(self._num_pages)]
        list(
            self._pool.map(
                lambda slot: self._tier.write(slot, self._data, page_meta(self._num_bytes)), self._slots
            )
        )

    def read(self) -> None:
        """Reads every page."""
        list(self._pool.map(self._read, self._slots))

    def _read(self, slot: Slot) -> None:
        if not hasattr(self._buffers, "out"):
            self._buffers.out = np.empty(self._num_bytes, np.uint8)
        self._tier.read(slot, self._buffers.out, page_meta(self._num_bytes))

    def close(self) -> None:
        """Ends the threads."""
        self._pool.shutdown()


def measure_drives(directories: Sequence[Path], arithmetic: Work, budget: Budget) -> TierSpeed:
    """The disk tier over these directories together; its files are gone afterwards.

    Raises:
        StoreLockedError: a store is open there.
        TierIOError, TierFullError: the drives refused, or have no room for 1 GiB each.
    """
    tier = DiskTier(list(directories), len(directories) << 30)
    large = _Round(tier, PAGE_BYTES, _PAGES)
    small = _Round(tier, SMALL_BYTES, 1)
    try:
        large.write()
        small.write()
        return speed_of(
            (large.read, large.write), (small.read, small.write), _PAGES * PAGE_BYTES, arithmetic, budget
        )
    finally:
        large.close()
        small.close()
        tier.close()
