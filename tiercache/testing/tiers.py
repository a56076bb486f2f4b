"""Simple tiers: memory, one plain file, nothing at all, and one that fails on demand."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from tiercache.errors import PageCorruptError, TierFullError, TierIOError
from tiercache.tiers.base import ByteArray, PageMeta, Slot, Tier


class _CountingTier(Tier):
    """Counts bytes; what it keeps is up to its subclasses."""

    def __init__(self, capacity_bytes: int, name: str) -> None:
        self.name = name
        self._capacity_bytes = capacity_bytes
        self._used_bytes = 0
        self._next = 0
        self._sizes: dict[int, int] = {}
        self._lock = threading.Lock()

    @property
    def capacity_bytes(self) -> int:
        """Budget."""
        return self._capacity_bytes

    @property
    def used_bytes(self) -> int:
        """Bytes of all slots."""
        return self._used_bytes

    def reserve(self, num_bytes: int) -> Slot:
        """Room for `num_bytes`."""
        with self._lock:
            free = self._capacity_bytes - self._used_bytes
            if num_bytes > free:
                raise TierFullError(f"{self.name}: no room", got=f"need {num_bytes}", limit=f"have {free}")
            self._next += 1
            self._sizes[self._next] = num_bytes
            self._used_bytes += num_bytes
            return Slot(self._next, num_bytes)

    def free(self, slot: Slot) -> None:
        """Ends a slot."""
        with self._lock:
            self._used_bytes -= self._sizes.pop(slot.handle)
            self._forget(slot.handle)

    def _forget(self, handle: int) -> None:
        """Drops what a slot held."""

    def check_integrity(self) -> None:
        """Raises AssertionError when sizes and sum disagree."""
        with self._lock:
            assert sum(self._sizes.values()) == self._used_bytes <= self._capacity_bytes

    def close(self) -> None:
        """Ends every slot."""
        with self._lock:
            for handle in list(self._sizes):
                self._forget(handle)
            self._sizes.clear()
            self._used_bytes = 0


class MemoryTier(_CountingTier):
    """Slots in memory of their own, filled with a pattern when they end, so that early reuse shows."""

    def __init__(self, capacity_bytes: int, *, name: str = "host") -> None:
        super().__init__(capacity_bytes, name)
        self._memory: dict[int, ByteArray] = {}

    def _forget(self, handle: int) -> None:
        memory = self._memory.pop(handle, None)
        if memory is not None:
            memory.fill(0xDB)

    def view(self, slot: Slot) -> ByteArray:
        """The slot's memory."""
        with self._lock:
            return self._memory.setdefault(slot.handle, np.full(slot.num_bytes, 0xDB, np.uint8))

    def write(self, slot: Slot, data: ByteArray, meta: PageMeta) -> None:
        """Copies `data` in."""
        np.copyto(self.view(slot)[: meta.stored_bytes], data)

    def read(self, slot: Slot, out: ByteArray, meta: PageMeta) -> None:
        """Copies the slot out."""
        np.copyto(out, self.view(slot)[: meta.stored_bytes])


class FileTier(_CountingTier):
    """Slots one after the other in one plain file, without proofs or recovery."""

    def __init__(self, directory: Path, capacity_bytes: int, *, name: str = "disk") -> None:
        super().__init__(capacity_bytes, name)
        directory.mkdir(parents=True, exist_ok=True)
        self._file = os.open(directory / "pages", os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
        self._end = 0
        self._offsets: dict[int, int] = {}
        self._spare: dict[int, list[int]] = {}

    def write(self, slot: Slot, data: ByteArray, meta: PageMeta) -> None:
        """Writes the slot's bytes."""
        with self._lock:
            reusable = self._spare.get(slot.num_bytes)
            offset = reusable.pop() if reusable else self._end
            if offset == self._end:
                self._end += slot.num_bytes
            self._offsets[slot.handle] = offset
        os.pwrite(self._file, data.data, offset)

    def read(self, slot: Slot, out: ByteArray, meta: PageMeta) -> None:
        """Reads the slot's bytes."""
        if os.preadv(self._file, [out.data], self._offsets[slot.handle]) != out.size:
            raise PageCorruptError(f"{self.name}: short read")

    def free(self, slot: Slot) -> None:
        """Ends a slot; its part of the file is reused by the next of that size."""
        offset = self._offsets.get(slot.handle)
        super().free(slot)
        if offset is not None:
            with self._lock:
                self._spare.setdefault(slot.num_bytes, []).append(offset)

    def _forget(self, handle: int) -> None:
        self._offsets.pop(handle, None)

    def close(self) -> None:
        """Closes the file."""
        super().close()
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


class NullTier(_CountingTier):
    """Takes every page and keeps none: each read fails its proof. For the cost of everything else."""

    def __init__(self, capacity_bytes: int, *, name: str = "disk") -> None:
        super().__init__(capacity_bytes, name)

    def write(self, slot: Slot, data: ByteArray, meta: PageMeta) -> None:
        """Drops `data`."""

    def read(self, slot: Slot, out: ByteArray, meta: PageMeta) -> None:
        """Raises PageCorruptError."""
        raise PageCorruptError(f"{self.name}: keeps nothing")


class FaultTier(Tier):
    """Another tier, and before each call the test's own function, which may wait or raise.

    Args:
        inner: does the work.
        fault: called with "reserve", "write" or "read" and the bytes; what it raises is what the caller gets.
    """

    def __init__(self, inner: Tier, fault: Callable[[str, int], None]) -> None:
        self.inner = inner
        self.fault = fault
        self.name = inner.name

    @property
    def capacity_bytes(self) -> int:
        """The inner tier's."""
        return self.inner.capacity_bytes

    @property
    def used_bytes(self) -> int:
        """The inner tier's."""
        return self.inner.used_bytes

    def reserve(self, num_bytes: int) -> Slot:
        """The inner tier's, unless it fails."""
        self.fault("reserve", num_bytes)
        return self.inner.reserve(num_bytes)

    def write(self, slot: Slot, data: ByteArray, meta: PageMeta) -> None:
        """The inner tier's, unless it fails."""
        self.fault("write", meta.stored_bytes)
        self.inner.write(slot, data, meta)

    def read(self, slot: Slot, out: ByteArray, meta: PageMeta) -> None:
        """The inner tier's, unless it fails."""
        self.fault("read", meta.stored_bytes)
        self.inner.read(slot, out, meta)

    def free(self, slot: Slot) -> None:
        """The inner tier's."""
        self.inner.free(slot)

    def check_integrity(self) -> None:
        """The inner tier's."""
        self.inner.check_integrity()

    def close(self) -> None:
        """The inner tier's."""
        self.inner.close()


def io_error(number: int) -> TierIOError:
    """What a tier raises for an errno."""
    error = TierIOError(f"write: {os.strerror(number)}")
    error.errno = number
    return error


def failing(operation: str, number: int, *, times: int | None = None) -> Callable[[str, int], None]:
    """A fault: `operation` fails with that errno, the first `times` times or always."""
    left: list[Any] = [times]

    def fault(called: str, _num_bytes: int) -> None:
        if called == operation and left[0] != 0:
            if left[0] is not None:
                left[0] -= 1
            raise io_error(number)

    return fault
