"""How a store is made, watched and ended, whatever its pages are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, Self

from tiercache.accesses import Record
from tiercache.books_proof import prove
from tiercache.clock import Clock
from tiercache.config import StoreConfig
from tiercache.parts import create_parts
from tiercache.spans import compute_span
from tiercache.stats import Stats
from tiercache.tiers.base import Tier


class StoreLife:
    """What is left of `TierStore` without its pages: from the options that make its parts to their end."""

    def __init__(
        self,
        config: StoreConfig,
        tiers: Sequence[Tier] | None,
        create_policy: Callable[..., Any] | None,
        clock: Clock,
    ) -> None:
        if create_policy is None:
            # Imported here: the policies bring numba along.
            from tiercache import policies as shipped

            create_policy = shipped.create_policy
        self.config = config
        self._bug: BaseException | None = None
        parts = create_parts(config, tiers, create_policy, clock, self._note_bug)
        self._parts, self._books, self._entrance = parts, parts.books, parts.entrance

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def keeps_pages(self) -> bool:
        """Whether persistent pages outlive this process: it has a disk tier with a durability of its own."""
        return self._books.tiers[-1].keeps_records

    def flush(self) -> None:
        """Waits until no transfer is queued or in progress, and persistent pages are as durable as promised.

        Raises:
            StoreTimeoutError: not by the deadline.
            TierIOError: the index of the disk tier cannot be written.
        """
        with self._entrance:
            self._entrance.collect()
        clock = self._books.clock
        self._parts.threads.drain(clock.now() + self.config.timeout_s, clock)
        if self.keeps_pages:
            self._books.tiers[-1].flush(self.config.timeout_s)
        if self._bug is not None:
            raise self._bug

    def stats(self) -> Stats:
        """What the store did so far; also after close."""
        return self._parts.stats()

    def record_accesses(self) -> AbstractContextManager[Record]:
        """Collects (operation, key) of every access made inside the block, in order."""
        return self._parts.accesses.record()

    def span(self, name: str) -> AbstractContextManager[None]:
        """Compute under this name: an event of the timeline, and an NVTX range where there is CUDA."""
        return compute_span(name, self._books.timeline, self._books.clock)

    def check_integrity(self) -> None:
        """Raises AssertionError when books, tiers and policies do not agree, StoreClosedError after close."""
        with self._entrance:
            self._entrance.collect()
            prove(self._books)

    def close(self) -> None:
        """Ends transfers, threads and tiers, and drops every page but the persistent ones on disk, of which those on
        their way there are waited for. A second call does nothing.

        Raises:
            StoreTimeoutError: a thread was still blocked in a copy at the deadline.
        """
        self._entrance.check_process()
        books = self._books
        with books.changed:
            if not books.closed:
                self._parts.keeper.finish()
            if books.closed:  # before, or by another thread meanwhile
                return
            books.closed = True
            books.changed.notify_all()
        self._parts.close(self.config.timeout_s)

    def _note_bug(self, error: BaseException) -> None:
        self._bug = error
