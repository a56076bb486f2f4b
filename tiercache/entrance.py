"""The entrance of a store: what a call from outside meets before anything is done for it."""

from __future__ import annotations

import os

from tiercache.accesses import Accesses
from tiercache.discards import Discards
from tiercache.entry import Entry, PageKey
from tiercache.errors import StoreForkedError
from tiercache.lending import Loans
from tiercache.placement import Books
from tiercache.plan import Operation
from tiercache.reading import Leases


class Entrance:
    """Lets calls in from the process that opened the store, and does the work that finalizers left for them.

    As a context manager it is the store's lock, held by a call that needs the store open.

    Raises:
        StoreForkedError: on entering, in a process that was forked off.
        StoreClosedError: on entering, after close.
    """

    def __init__(
        self, books: Books, leases: Leases, loans: Loans, discards: Discards, accesses: Accesses
    ) -> None:
        self._pid = os.getpid()
        self._books = books
        self._leases = leases
        self._loans = loans
        self._discards = discards
        self._accesses = accesses

    def __enter__(self) -> None:
        self.check_process()
        self._books.changed.acquire()
        try:
            self._books.check_open()
        except BaseException:
            self._books.changed.release()
            raise

    def __exit__(self, *error: object) -> None:
        self._books.changed.release()

    def check_process(self) -> None:
        """Raises StoreForkedError in another process; before the lock, whose holder a fork leaves behind."""
        if os.getpid() != self._pid:
            raise StoreForkedError(
                "the store belongs to the parent process", remedy="open a store after the fork"
            )

    def begin(self, operation: Operation, key: PageKey, num_bytes: int = 0) -> Entry | None:
        """What every access does first, under the lock: checks, overdue work, and notes; returns the page's entry.

        `num_bytes` is the size of the page that the access may make.
        """
        books = self._books
        if books.closed:
            books.check_open()
        self.collect()
        entry = books.table.get(key)
        if self._accesses.watched:
            self._accesses.note(operation, key, entry, num_bytes)
        return entry

    def collect(self) -> None:
        """Ends leases, loans and references that finalizers gave up; under the lock."""
        self._leases.collect()
        self._loans.collect()
        self._discards.collect()

    def collect_if_free(self) -> None:
        """The same at once where that needs no wait, for finalizers."""
        # The lock is not reentrant: a finalizer that runs inside the store finds it taken, by its own thread too.
        if os.getpid() == self._pid and self._books.changed.acquire(blocking=False):
            try:
                if not self._books.closed:
                    self.collect()
            finally:
                self._books.changed.release()
