"""What a store did, access by access (Parquet) and transfer by transfer (Chrome trace JSON)."""

from __future__ import annotations

import json
import math
import threading
from pathlib import Path
from typing import Any

from tiercache.entry import PageKey
from tiercache.errors import TraceError
from tiercache.policies.recorded import META

COLUMNS = ("time", "key", "op", "bytes", "tier", "policy", "id", "cost")


class AccessTrace:
    """Rows of accesses and of what the tiers' policies were told, kept in memory and written by `save`.

    Columns: `time` in seconds since the store was opened, `key` a dense number of the page's key, `op` as in an
    access plan, `bytes` the page's logical size, `tier` where the page was found ("" where it was nowhere). In these
    rows `policy` is "", `id` -1 and `cost` not a number. Rows whose `policy` names a tier are `PolicyNote`'s.

    Attributes:
        path: the file.
        tiers: what `policy_note.about` says of each policy; kept in the file's metadata.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.tiers: list[dict[str, Any]] = []
        self._ids: dict[PageKey, int] = {}
        self._rows: tuple[list[Any], ...] = tuple([] for _ in COLUMNS)

    def add(self, time_s: float, key: PageKey, op: str, num_bytes: int, tier: str) -> None:
        """Appends one access."""
        self._append(time_s, self._number(key), op, num_bytes, tier, "", -1, math.nan)

    def add_question(
        self, time_s: float, key: PageKey | None, op: str, number: int, policy: str, page: int, cost: float
    ) -> None:
        """Appends one row about the policy of the tier `policy`; `number` goes to the column `bytes`."""
        self._append(time_s, -1 if key is None else self._number(key), op, number, "", policy, page, cost)

    def _number(self, key: PageKey) -> int:
        return self._ids.setdefault(key, len(self._ids))

    def _append(self, *row: Any) -> None:
        for column, value in zip(self._rows, row, strict=True):
            column.append(value)

    def __len__(self) -> int:
        return len(self._rows[0])

    def save(self) -> None:
        """Writes the Parquet file. Raises TraceError when it cannot be written."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        words = pa.dictionary(pa.int8(), pa.string())
        kinds = (
            pa.float64(),
            pa.int64(),
            words,
            pa.int64(),
            pa.string(),
            words,
            pa.int32(),
            pa.float64(),
        )
        arrays = [pa.array(rows, kind) for rows, kind in zip(self._rows, kinds, strict=True)]
        table = pa.table(arrays, names=list(COLUMNS))
        try:
            pq.write_table(table.replace_schema_metadata({META: json.dumps(self.tiers)}), self.path)
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
