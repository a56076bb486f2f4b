"""The contract of a tier: a place with a budget that keeps bytes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tiercache.entry import PageKey

ByteArray = npt.NDArray[np.uint8]


class PageMeta(NamedTuple):  # and not a frozen dataclass: thousands are made by a look-up of many keys
    """What a record says of its payload, enough to decode it without any index.

    Attributes:
        digest: 32-byte key of the page.
        namespace: 32-byte digest of what the page depends on; a record of another one is a miss.
        dtype: torch's name without "torch.", as in "bfloat16".
        shape: of the decoded tensor.
        codec: name of the codec that made the payload.
        raw_bytes: size of the decoded tensor.
        stored_bytes: size of the payload.
        key: the fields behind `digest` where the caller has them; a record keeps them for listings.
        persistent: the record outlives this process where the tier is opened for that. Only for pages that are
            keyed by content alone (`PageKey.graph` 0): ids of graphs start again with the next process. Their node
            names the weights by what they are, not by where they lie.
    """

    digest: bytes
    namespace: bytes
    dtype: str
    shape: tuple[int, ...]
    codec: str
    raw_bytes: int
    stored_bytes: int
    key: PageKey | None = None
    persistent: bool = False


class Slot(NamedTuple):
    """Room in a tier. Made by `reserve`, ended by `free`; `handle` is the tier's own."""

    handle: Any
    num_bytes: int


class Tier(ABC):
    """A place with a budget that keeps bytes.

    Caller guarantees: a slot is written once before it is read, by one thread; no read or write of a slot is
    in progress when it is freed; `meta.stored_bytes` equals the size of what is written and is at most the
    slot's size.
    Implementation must: never exceed `capacity_bytes`, in-flight buffers included; be safe from several
    threads; release the GIL around work; raise `TierFullError` from `reserve` without side effects; raise
    `PageCorruptError` rather than return wrong bytes; raise `TierIOError` with the original errno.
    """

    name: str
    keeps_records: bool = False
    """Whether records written as persistent are found by a later process."""

    @property
    @abstractmethod
    def capacity_bytes(self) -> int:
        """Budget."""

    @property
    @abstractmethod
    def used_bytes(self) -> int:
        """Bytes of budget in use, slots' overhead (headers, padding) included."""

    @abstractmethod
    def reserve(self, num_bytes: int) -> Slot:
        """Room for `num_bytes` (at least 1). Raises TierFullError at once when there is none."""

    @abstractmethod
    def write(self, slot: Slot, data: ByteArray, meta: PageMeta) -> None:
        """Copies `data` (one-dimensional, contiguous) into the slot. Blocks; called from worker threads."""

    @abstractmethod
    def read(self, slot: Slot, out: ByteArray, meta: PageMeta) -> None:
        """Fills `out`, of exactly `meta.stored_bytes`, with what was written. Blocks."""

    @abstractmethod
    def free(self, slot: Slot) -> None:
        """Ends a slot, written or not."""

    @abstractmethod
    def check_integrity(self) -> None:
        """Raises AssertionError when the tier's books do not add up."""

    @abstractmethod
    def close(self) -> None:
        """Ends the tier and its threads within a bounded time. A second call does nothing."""

    @property
    def spare_bytes(self) -> int:
        """Of the bytes in use, those of records that nobody claims and that give way when room is needed."""
        return 0

    def make_room(self, num_bytes: int, timeout_s: float) -> bool:
        """Waits for room that is on its way back, so that `reserve` finds it; False when none is.

        Records that nobody claims give way. Called without any lock held.
        """
        return False

    def lookup_many(self, digests: Sequence[bytes]) -> list[tuple[Slot, PageMeta] | None]:
        """Claims the persistent record of each key, where there is one; `let_go` ends a claim."""
        return [None] * len(digests)

    def let_go(self, slot: Slot) -> None:
        """Ends a slot; its record, if it is persistent, stays for a later look-up until room is needed."""
        self.free(slot)

    def flush(self, timeout_s: float) -> None:
        """Waits until what was written is as durable as the tier promises. Raises StoreTimeoutError, TierIOError."""
        return

    def view(self, slot: Slot) -> ByteArray | None:
        """The slot's memory itself where the tier is addressable memory, else None."""
        return None
