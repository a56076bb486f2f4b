"""The thread that carries the core's changes to the index, many to a commit."""

from __future__ import annotations

import logging
import threading
import time

from tiercache import _core
from tiercache.errors import StoreClosedError
from tiercache.tiers.disk_index import Change, DiskIndex

_log = logging.getLogger(__name__)
_BATCH = 256  # entries of one commit at most
_GATHER_S = 0.01  # how long a commit waits for company
_RETRY_S = 0.1


class IndexWriter:
    """Takes changes from the core, commits them, confirms them.

    The core syncs the records behind a batch before it hands the batch out, and reuses the room of deleted records only
    once their deletion is confirmed.

    Attributes:
        error: why the last commit failed; None once one works again.
        whole: whether every record so far was committed: those of a commit that failed stay out of the index.
    """

    def __init__(self, core: _core.Disk, index: DiskIndex, *, logged: bool) -> None:
        self._core = core
        self._index = index
        self._logged = logged
        self.error: Exception | None = None
        self.whole = True
        self._untold: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="tiercache-index", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            while True:
                changes = self._core.take_changes(_BATCH, 0.5, _GATHER_S)
                if changes:
                    self._core.confirm_changes(self._commit(changes))
        except StoreClosedError:
            return

    def _commit(self, changes: list[Change]) -> bool:
        if self._logged:
            self._core.mark_log("commit", b"".join(_line(change) for change in changes))
        try:
            self._index.apply(changes)
        except Exception as error:  # disk full, map full, I/O: a miss for a later process, nothing else
            if self.error is None:
                _log.warning("disk tier: the index cannot be written: %s", error)
            self.error = error
            if any(value is not None for _, _, value in changes):  # deletions wait, and are tried again
                self._untold, self.whole = error, False
            time.sleep(_RETRY_S)
            return False
        self.error = None
        if self._logged:
            self._core.mark_log("committed", b"")
        return True

    def take_failure(self, *, now: bool) -> Exception | None:
        """Why a commit of records failed since the last call, even when later ones worked; `now`: or why the last of
        any changes did.
        """
        failure, self._untold = self._untold, None
        return self.error if failure is None and now else failure

    def join(self, timeout_s: float) -> None:
        """Waits for the thread, which ends once the core is closed."""
        self._thread.join(timeout_s)


def _line(change: Change) -> bytes:
    digest, sequence, value = change
    body = digest + sequence.to_bytes(8, "little") + (value or b"")
    return len(body).to_bytes(4, "little") + body


def changes_of(line: bytes) -> list[Change]:
    """The changes in one mark of the write log."""
    changes: list[Change] = []
    while line:
        size = int.from_bytes(line[:4], "little")
        body, line = line[4 : 4 + size], line[4 + size :]
        changes.append((body[:32], int.from_bytes(body[32:40], "little"), body[40:] or None))
    return changes
