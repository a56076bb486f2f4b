"""What a store did, access by access (Parquet) and as a timeline (Chrome trace JSON)."""

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


SHORTEST_STALL_S = 50e-6  # of a timeline: taking the lock is no stall
_TRACKS = ("compute", "stalls", "copies", "disk")


class Timeline:
    """A store's doings as events of the Chrome trace format; open the file in Perfetto or chrome://tracing.

    Compute, stalls, copies and disk have tracks of their own, one for each thread that was at it. On an accelerator
    compute is what the host launched, not when it ran there: NVTX ranges of the same names show that in Nsight.
    """

    def __init__(self, path: str | Path, start_s: float) -> None:
        self.path = Path(path)
        self._start_s = start_s
        self._events: list[dict[str, Any]] = []
        self._lanes: dict[tuple[str, int], int] = {}

    def add(self, track: str, name: str, start_s: float, end_s: float, **args: Any) -> None:
        """Appends one complete event of the calling thread to "compute", "stalls", "copies" or "disk"."""
        self._events.append(
            {
                "name": name,
                "cat": track,
                "ph": "X",
                "ts": (start_s - self._start_s) * 1e6,
                "dur": (end_s - start_s) * 1e6,
                "pid": 0,
                "tid": self._lane(track),
                "args": args,
            }
        )

    def copied(self, direction: str, page: str, start_s: float, end_s: float, num_bytes: int) -> None:
        """A transfer between tiers, as in "host->disk"."""
        track = "disk" if "disk" in direction.split("->") else "copies"
        self.add(track, direction, start_s, end_s, page=page, bytes=num_bytes)

    def stalled(self, name: str, page: str, start_s: float, end_s: float) -> None:
        """A wait for a page or for room; very short ones are left out."""
        if end_s - start_s >= SHORTEST_STALL_S:
            self.add("stalls", name, start_s, end_s, page=page)

    def _lane(self, track: str) -> int:
        """The number of this thread's track: events of one track never overlap."""
        key = track, threading.get_ident()
        if key not in self._lanes:
            before = sum(other == track for other, _ in self._lanes)
            self._lanes[key] = 100 * (1 + _TRACKS.index(track)) + before
        return self._lanes[key]

    def _names(self) -> list[dict[str, Any]]:
        return [
            {
                "name": "thread_name",
                "ph": "M",
                "pid": 0,
                "tid": lane,
                "args": {"name": f"{track} {lane % 100 + 1}"},
            }
            for (track, _), lane in self._lanes.items()
        ]

    def save(self) -> None:
        """Writes the JSON file. Raises TraceError when it cannot be written."""
        document = {"traceEvents": self._names() + self._events, "displayTimeUnit": "ms"}
        try:
            self.path.write_text(json.dumps(document))
        except OSError as error:
            raise TraceError(f"timeline: cannot write {self.path}: {error}") from error
