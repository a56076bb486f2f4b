"""A trace in memory: requests with dense ids, and what the ids stood for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from tiercache.policies.base import GET, HIT, NEVER, REMOVE, REQUEST, TAKE
from tiercache.policies.errors import TraceError

Sizes = Literal["error", "each", "last"]
UNKNOWN = -1  # next use: not known


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in order.

    Attributes:
        requests: records of `REQUEST`; ids are dense, in order of first appearance.
        keys: what each id stood for: integers or text, indexed by id.
        source: where the trace came from, for messages.
        times_s: seconds of each request since the first, or None.
        tags: names of the numbers in requests["tag"] (kinds of page).
    """

    requests: npt.NDArray[Any]
    keys: npt.NDArray[Any]
    source: str = "memory"
    times_s: npt.NDArray[np.float64] | None = None
    tags: tuple[str, ...] = field(default=())

    def __len__(self) -> int:
        return len(self.requests)

    @property
    def num_objects(self) -> int:
        """Distinct ids."""
        return len(self.keys)

    @property
    def has_next_uses(self) -> bool:
        """Whether every request says when its page is used next."""
        return bool((self.requests["next_use"] != UNKNOWN).all())

    @property
    def num_bytes(self) -> int:
        """Bytes of all counted requests."""
        counted = np.isin(self.requests["op"], (GET, TAKE))
        return int(self.requests["size"][counted].sum())

    @property
    def footprint_bytes(self) -> int:
        """Bytes of all distinct pages, each at its largest."""
        largest = np.zeros(self.num_objects, np.int64)
        np.maximum.at(largest, self.requests["id"], self.requests["size"])
        return int(largest.sum())

    def part(self, start: int, stop: int) -> Trace:
        """Requests [start, stop) with the same ids; next uses are counted anew if they were known."""
        times = None if self.times_s is None else self.times_s[start:stop]
        cut = replace(self, requests=self.requests[start:stop].copy(), times_s=times)
        return with_next_uses(cut) if self.has_next_uses else cut

    def select(self, wanted: npt.NDArray[np.bool_]) -> Trace:
        """The requests of the ids that are `wanted` (a mask by id), with new dense ids."""
        keep = wanted[self.requests["id"]]
        requests = self.requests[keep].copy()
        number = np.cumsum(wanted) - 1
        requests["id"] = number[requests["id"]]
        times = None if self.times_s is None else self.times_s[keep]
        cut = replace(self, requests=requests, keys=self.keys[wanted], times_s=times)
        return with_next_uses(cut) if self.has_next_uses and len(requests) else cut


def make_trace(
    keys: Any,
    sizes: Any = 1,
    *,
    source: str = "memory",
    costs: Any = np.nan,
    next_uses: Any = UNKNOWN,
    ops: Any = GET,
    times_s: Any = None,
    tag_numbers: Any = 0,
    tags: Sequence[str] = (),
    resize: Sizes = "error",
    first_record: int = 0,
    unit: str = "record",
) -> Trace:
    """A trace of columns; each may be one value for all requests.

    Args:
        keys: integers or text naming the pages.
        sizes: bytes.
        source: for messages.
        costs: seconds to load a page again; NaN where the tier's profile decides.
        next_uses: index of the request that uses the page next, NEVER, or -1 for not known.
        ops: operations of `policies.base`.
        times_s: seconds since the first request.
        tag_numbers: indices into `tags`.
        tags: names of kinds.
        resize: what pages that change their size are: an "error", taken as they come ("each"), or given the
            size of their last request throughout ("last").
        first_record: number of the first record in messages.
        unit: what they call it.

    Raises:
        TraceError: nothing in it, a negative size or cost, or a size that changes.
    """
    import pyarrow as pa

    try:
        encoded = pa.array(keys).dictionary_encode()
    except (pa.ArrowException, OverflowError) as error:
        raise TraceError(f"{source}: keys are neither 64-bit integers nor text", got=error) from error
    count = len(encoded)
    if count == 0:
        raise TraceError(f"{source}: the trace is empty", got="no requests")
    requests = np.zeros(count, REQUEST)
    requests["id"] = encoded.indices.to_numpy()
    columns = {"size": sizes, "cost": costs, "next_use": next_uses, "op": ops, "tag": tag_numbers}
    _fill(requests, columns, source)
    names = encoded.dictionary.to_numpy(zero_copy_only=False)
    times = None if times_s is None else np.asarray(times_s, np.float64)
    _check_signs(requests, source, first_record, unit)
    trace = Trace(requests, names, source, times, tuple(tags))
    return _settle_sizes(trace, resize, first_record, unit)


def _fill(requests: npt.NDArray[Any], columns: dict[str, Any], source: str) -> None:
    for name, values in columns.items():
        try:
            requests[name] = values
        except (ValueError, TypeError, OverflowError) as error:
            raise TraceError(f"{source}: {name} is no column of 64-bit numbers", got=error) from error


def _check_signs(requests: npt.NDArray[Any], source: str, first_record: int, unit: str) -> None:
    for name in ("size", "cost"):
        bad = np.flatnonzero(requests[name] < 0)
        if len(bad):
            raise TraceError(
                f"{source}: negative {name} in {unit} {first_record + bad[0]}", got=requests[name][bad[0]]
            )


def _settle_sizes(trace: Trace, resize: Sizes, first_record: int, unit: str) -> Trace:
    ids, sizes = trace.requests["id"], trace.requests["size"]
    last = np.zeros(trace.num_objects, np.int64)
    last[ids] = sizes  # the last one stays
    if resize == "last":
        trace.requests["size"] = last[ids]
    elif resize == "error" and (changed := np.flatnonzero(sizes != last[ids])).size:
        key = trace.keys[ids[changed[0]]]
        raise TraceError(
            f"{trace.source}: key {key} of {unit} {first_record + changed[0]} changes its size",
            got=f"{sizes[changed[0]]} bytes, later {last[ids[changed[0]]]}",
            remedy='read with resize="each" (as recorded) or resize="last" (one size throughout)',
        )
    return trace


def with_next_uses(trace: Trace) -> Trace:
    """The trace with the next use of every request: the next lookup of its page, NEVER when it is removed first."""
    requests = trace.requests.copy()
    count = len(requests)
    order = np.argsort(requests["id"], kind="stable")
    ids = requests["id"][order]
    ops = requests["op"][order]
    relevant = np.isin(ops, (GET, TAKE, HIT, REMOVE))
    place = np.where(relevant, np.arange(count), count)
    following = np.full(count + 1, count)
    following[:count] = np.minimum.accumulate(place[::-1])[::-1]
    after = following[1:]
    safe = np.minimum(after, count - 1)
    real = (after < count) & (ids[safe] == ids) & (ops[safe] != REMOVE)
    requests["next_use"][order] = np.where(real, order[safe], NEVER)
    return replace(trace, requests=requests)
