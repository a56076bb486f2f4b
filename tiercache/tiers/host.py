"""The host tier: slots in one native memory arena."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from tiercache import _core
from tiercache.errors import ConfigError, PageStateError, StoreClosedError
from tiercache.tiers.base import ByteArray, PageMeta, Slot, Tier

_log = logging.getLogger(__name__)

# Share of the memory that is available at open which the arena may take; the rest is for the process itself.
_AVAILABLE_SHARE = 0.9


class HostTier(Tier):
    """Host memory with a budget: one exact-size mapping that never grows, kept out of core dumps.

    Slots of 4 KiB and more start on a 4 KiB boundary, so that the disk tier reads and writes them without a copy.

    Args:
        capacity_bytes: budget; cut to what the process's memory cgroups and the machine have left at open.
        staging_bytes: room beside the budget that only `staging` hands out: pages that are kept can never take the
            memory that a copy on its way needs. `tiercache.staging` lends it, up and down, by one order.
        pin: page-lock the arena with the CUDA runtime. No effect where there is none (see `pinned`).
        huge_pages: ask the kernel for transparent huge pages.
        numa_node: bind the arena to this node; None leaves the kernel's placement.
        touch_threads: threads that touch every page at open; None: 4 when pinned, else pages are taken at first use.
    """

    name = "host"

    def __init__(
        self,
        capacity_bytes: int,
        *,
        staging_bytes: int = 0,
        pin: bool = False,
        huge_pages: bool = False,
        numa_node: int | None = None,
        touch_threads: int | None = None,
    ) -> None:
        if capacity_bytes < 4096:
            raise ConfigError("host tier: capacity_bytes", got=capacity_bytes, limit="4096 or more")
        room_bytes = int(_core.available_memory() * _AVAILABLE_SHARE) - staging_bytes
        if touch_threads is None:
            touch_threads = 4 if pin else 0
        self._arena: _core.Arena | None = _core.Arena(
            max(4096, min(capacity_bytes, room_bytes)),
            staging_bytes,
            huge_pages=huge_pages,
            numa_node=-1 if numa_node is None else numa_node,
            touch_threads=touch_threads,
            register_cuda=pin,
        )
        self._capacity_bytes = self._arena.capacity_bytes
        if room_bytes < capacity_bytes:
            _log.warning(
                "host tier: budget of %d bytes cut to %d, of what memory cgroups and the machine have left",
                capacity_bytes,
                self._capacity_bytes,
            )

    def _open(self) -> _core.Arena:
        if self._arena is None:
            raise StoreClosedError("host tier: used after close()")
        return self._arena

    @property
    def capacity_bytes(self) -> int:
        """Budget after the cut at open, in whole 4 KiB pages."""
        return self._capacity_bytes

    @property
    def used_bytes(self) -> int:
        """Bytes of the pages that hold slots."""
        return 0 if self._arena is None else self._arena.used_bytes

    @property
    def staging_used_bytes(self) -> int:
        """Bytes of the pages that are lent out of the staging part."""
        return 0 if self._arena is None else int(self._arena.stats().staging_used_bytes)

    @property
    def pinned(self) -> bool:
        """True when the CUDA runtime has page-locked the arena."""
        return self._open().cuda_registered

    def stats(self) -> _core.ArenaStats:
        """Counters and sizes of the arena."""
        return self._open().stats()

    def reserve(self, num_bytes: int, timeout_s: float = 0.0) -> Slot:
        """Room for `num_bytes`; waits up to `timeout_s` for it.

        Raises:
            TierFullError: there is none, at once (`timeout_s` 0, or more than the budget).
            StoreTimeoutError: there was none until the deadline.
        """
        return Slot(self._open().reserve(num_bytes, timeout_s, staging=False), num_bytes)

    @contextmanager
    def staging(self, num_bytes: int, timeout_s: float) -> Iterator[ByteArray]:
        """Memory for bytes on their way, from the part that slots cannot take.

        Raises:
            TierFullError: more than the whole staging part.
            StoreTimeoutError: others held it until the deadline.
        """
        arena = self._open()
        offset = arena.reserve(num_bytes, timeout_s, staging=True)
        try:
            yield arena.view(offset)
        finally:
            arena.release(offset)

    def view(self, slot: Slot) -> ByteArray:
        """The slot's memory, `slot.num_bytes` long. Valid until the slot is freed."""
        return self._open().view(slot.handle)

    def write(self, slot: Slot, data: ByteArray, meta: PageMeta) -> None:
        """Copies `data` into the slot."""
        if data.size != meta.stored_bytes or data.size > slot.num_bytes:
            limit = f"{meta.stored_bytes} and at most {slot.num_bytes} bytes"
            raise PageStateError("host tier: write of another size", got=data.size, limit=limit)
        np.copyto(self.view(slot)[: data.size], data)

    def read(self, slot: Slot, out: ByteArray, meta: PageMeta) -> None:
        """Fills `out` from the slot."""
        if out.size != meta.stored_bytes or out.size > slot.num_bytes:
            limit = f"{meta.stored_bytes} and at most {slot.num_bytes} bytes"
            raise PageStateError("host tier: read of another size", got=out.size, limit=limit)
        np.copyto(out, self.view(slot)[: out.size])

    def free(self, slot: Slot) -> None:
        """Ends a slot. After close() this does nothing: the arena is gone with all its slots."""
        if self._arena is not None:
            self._arena.release(slot.handle)

    def check_integrity(self) -> None:
        """Raises AssertionError when slots, cells and free extents do not add up."""
        if self._arena is None:
            return
        try:
            self._arena.check_integrity()
        except PageStateError as error:
            raise AssertionError(str(error)) from error

    def close(self) -> None:
        """Gives the memory back once no view of it is left."""
        self._arena = None
