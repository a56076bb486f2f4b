"""What a store did, access by access (Parquet) and transfer by transfer (Chrome trace JSON)."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

from tiercache.entry import PageKey
from tiercache.errors import TraceError

COLUMNS = ("time", "key", "op", "bytes", "tier")


class AccessTrace:
    """Rows of accesses, kept in memory and written by `save`.

    Columns: `time` in seconds since the store was opened, `key` a dense number of the page's key, `op` as in an
    access plan, `bytes` the page's logical size, `tier` where the page was found ("" where it was nowhere).
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._ids: dict[PageKey, int] = {}
        self._rows: tuple[list[Any], ...] = ([], [], [], [], [])

    def add(self, time_s: float, key: PageKey, op: str, num_bytes: int, tier: str) -> None:
        """Appends one row."""
        number = self._ids.setdefault(key, len(self._ids))
        for column, value in zip(self._rows, (time_s, number, op, num_bytes, tier), strict=True):
            column.append(value)

    def __len__(self) -> int:
        return len(self._rows[0])

    def save(self) -> None:
        """Writes the Parquet file. Raises TraceError when it cannot be written."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        kinds = (pa.float64(), pa.int64(), pa.dictionary(pa.int8(), pa.string()), pa.int64(), pa.string())
        arrays = [pa.array(rows, kind) for rows, kind in zip(self._rows, kinds, strict=True)]
        try:
            pq.write_table(pa.table(arrays, names=list(COLUMNS)), self.path)
        except OSError as error:
            raise TraceError(f"trace: cannot write {self.path}: {error}") from error


class Timeline:
    """Transfers as events of the Chrome trace format; open the file in Perfetto or chrome://tracing."""

    def __init__(self, path: str | Path, start_s: float) -> None:
        self.path = Path(path)
        self._start_s = start_s
        self._events: list[dict[str, Any]] = []

    def add(self, name: str, page: str, start_s: float, end_s: float, num_bytes: int) -> None:
        """Appends one complete event of the calling thread."""
        self._events.append(
            {
                "name": name,
                "cat": "transfer",
                "ph": "X",
                "ts": (start_s - self._start_s) * 1e6,
                "dur": (end_s - start_s) * 1e6,
                "pid": 0,
                "tid": threading.get_ident(),
                "args": {"page": page, "bytes": num_bytes},
            }
        )

    def save(self) -> None:
        """Writes the JSON file. Raises TraceError when it cannot be written."""
        document = {"traceEvents": self._events, "displayTimeUnit": "ms"}
        try:
            self.path.write_text(json.dumps(document))
        except OSError as error:
            raise TraceError(f"timeline: cannot write {self.path}: {error}") from error
