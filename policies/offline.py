"""What no policy can beat: Belady's optimum for equal sizes, and flow bounds for sizes, costs and leases.

Words: an interval lies between two uses of one page; keeping the page over it saves one load. Slot t is the time
from request t to t + 1. FOO (Berger, Beckmann and Harchol-Balter, "Practical bounds on optimal caching with variable
object sizes", SIGMETRICS 2018) is the linear program over intervals, as a min-cost flow; PFOO-L relaxes its slots to
their sum. All bounds count loads, so they are lower bounds; the first load of each page is compulsory.
The pinned variant knows that a used page is resident while it is used, and leased pages as long as they are leased.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from tiercache.policies.base import GET, LEASE, NEVER, RELEASE, TAKE
from tiercache.policies.errors import TraceError
from tiercache.policies.traces.base import Trace, with_next_uses

Weight = Literal["requests", "bytes", "cost"]
MAX_FLOW_REQUESTS = 20_000


@dataclass(frozen=True, slots=True)
class Bound:
    """A lower bound on what must be loaded.

    Attributes:
        loads: requests, bytes or seconds (by `weight`) that every policy must load.
        compulsory: part of it that are first loads.
        total: of all counted requests.
        method: "exact", "foo", "pfoo_l"; with "_pinned".
    """

    loads: float
    compulsory: float
    total: float
    method: str
    weight: Weight

    @property
    def miss_ratio(self) -> float:
        """Loads / total."""
        return self.loads / self.total if self.total else 0.0


@dataclass(frozen=True, slots=True)
class Intervals:
    """Intervals of a trace: slots [start, stop), bytes, and what keeping each saves."""

    start: npt.NDArray[np.int64]
    stop: npt.NDArray[np.int64]
    size: npt.NDArray[np.int64]
    gain: npt.NDArray[np.float64]
    slots: npt.NDArray[np.int64]  # bytes of each slot that pinned pages take
    compulsory: float
    total: float


def _weights(requests: npt.NDArray[Any], weight: Weight) -> npt.NDArray[np.float64]:
    if weight == "requests":
        return np.ones(len(requests))
    if weight == "bytes":
        return requests["size"].astype(np.float64)
    cost: npt.NDArray[np.float64] = np.where(np.isnan(requests["cost"]), 1.0, requests["cost"])
    return cost


def find_intervals(
    trace: Trace, weight: Weight = "requests", *, pinned: bool = False, warmup: int = 0
) -> Intervals:
    """Intervals whose second use is a counted request from `warmup` on."""
    requests = with_next_uses(trace).requests
    weights = _weights(requests, weight)
    counted = np.isin(requests["op"], (GET, TAKE))
    counted[:warmup] = False
    after = requests["next_use"]
    opens = np.isin(requests["op"], (GET, TAKE)) & (after < NEVER) & (requests["op"] != TAKE)
    start = np.flatnonzero(opens)
    stop = after[start]
    keep = counted[stop]
    start, stop = start[keep], stop[keep]
    size = requests["size"][stop]
    gain = weights[stop]
    compulsory = float(weights[counted].sum() - gain.sum())
    slots = np.zeros(len(requests), np.int64)
    if pinned:
        used = np.isin(requests["op"], (GET, TAKE))
        slots[used] = requests["size"][used]
        start = start + 1
        start, stop = _outside_leases(requests, start, stop, slots)
    return Intervals(start, stop, size, gain, slots, compulsory, float(weights[counted].sum()))


def _outside_leases(
    requests: npt.NDArray[Any], start: npt.NDArray[Any], stop: npt.NDArray[Any], slots: npt.NDArray[Any]
) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """Adds leased bytes to `slots` and cuts each interval to its longest part outside its page's leases."""
    held: dict[int, list[int]] = {}
    count: dict[int, int] = {}
    for t in np.flatnonzero(np.isin(requests["op"], (LEASE, RELEASE))):
        page = int(requests["id"][t])
        before = count.get(page, 0)
        count[page] = before + (1 if requests["op"][t] == LEASE else -1)
        if (before == 0) != (count[page] == 0):
            held.setdefault(page, []).append(int(t))
    if not held:
        return start, stop
    uses = requests["id"]
    last_size = np.zeros(int(uses.max()) + 1, np.int64)
    last_size[uses] = requests["size"]
    start, stop = start.copy(), stop.copy()
    for page, edges in held.items():
        bounds = [*edges, len(requests)] if len(edges) % 2 else edges
        for a, b in zip(bounds[::2], bounds[1::2], strict=True):
            own = np.arange(a, b)[uses[a:b] != page]  # a use of the page pins it already
            slots[own] += last_size[page]
            for e in np.flatnonzero((uses[stop] == page) & (start < b) & (stop > a)):
                if a - start[e] >= stop[e] - b:
                    stop[e] = max(start[e], min(stop[e], a))
                else:
                    start[e] = min(stop[e], max(start[e], b))
    return start, stop


def pfoo_l(
    trace: Trace, capacity_bytes: int, weight: Weight = "requests", *, pinned: bool = False, warmup: int = 0
) -> Bound:
    """PFOO-L: intervals by gain per byte and slot, as many as the slots' bytes together allow."""
    _check(trace, capacity_bytes)
    part = find_intervals(trace, weight, pinned=pinned, warmup=warmup)
    fits = part.size <= capacity_bytes
    area = part.size[fits] * (part.stop - part.start)[fits].astype(np.float64)
    gain = part.gain[fits]
    order = np.argsort(-gain / np.maximum(area, 1e-9), kind="stable")
    filled = np.cumsum(area[order])
    room = float(np.maximum(capacity_bytes - part.slots, 0).sum())
    full = int(np.searchsorted(filled, room, side="right"))
    saved = float(gain[order][:full].sum())
    if full < len(order):
        before = filled[full - 1] if full else 0.0
        saved += float(gain[order][full] * (room - before) / area[order][full])
    loads = max(part.total - saved, part.compulsory)
    return Bound(loads, part.compulsory, part.total, "pfoo_l" + "_pinned" * pinned, weight)


def foo(
    trace: Trace, capacity_bytes: int, weight: Weight = "requests", *, pinned: bool = False, warmup: int = 0
) -> Bound:
    """FOO's linear program, solved as a min-cost flow by HiGHS. For traces of up to 20,000 requests."""
    import scipy.optimize
    import scipy.sparse

    _check(trace, capacity_bytes)
    if len(trace) > MAX_FLOW_REQUESTS:
        raise TraceError(
            "foo: the trace is long",
            got=f"{len(trace)} requests",
            limit=MAX_FLOW_REQUESTS,
            remedy="use pfoo_l, or a part of the trace",
        )
    part = find_intervals(trace, weight, pinned=pinned, warmup=warmup)
    method = "foo" + "_pinned" * pinned
    free = part.start >= part.stop  # pinned from use to use: always saved
    saved = float(part.gain[free].sum())
    start, stop, size, gain = (x[~free] for x in (part.start, part.stop, part.size, part.gain))
    count, arcs = len(trace), len(start)
    if arcs == 0:
        return Bound(part.total - saved, part.compulsory, part.total, method, weight)
    # Nodes are requests. An interval's bytes flow from start to stop: along the slots (kept), or past them (loaded).
    inner = np.arange(count - 1)
    tails = np.concatenate([inner, start])
    heads = np.concatenate([inner + 1, stop])
    columns = np.arange(len(tails))
    incidence = scipy.sparse.csr_array(
        (
            np.concatenate([np.ones(len(tails)), -np.ones(len(tails))]),
            (np.concatenate([tails, heads]), np.tile(columns, 2)),
        ),
        shape=(count, len(tails)),
    )
    supply = np.zeros(count)
    np.add.at(supply, start.astype(np.int64), size)
    np.subtract.at(supply, stop.astype(np.int64), size)
    room = np.maximum(capacity_bytes - part.slots[:-1], 0)
    cost = np.concatenate([np.zeros(count - 1), gain / size])
    limits = np.column_stack([np.zeros(len(tails)), np.concatenate([room, size])])
    solved = scipy.optimize.linprog(cost, A_eq=incidence, b_eq=supply, bounds=limits, method="highs")
    if not solved.success:
        raise TraceError(
            f"foo: the linear program has no solution: {solved.message}", remedy="check leases and sizes"
        )
    loads = part.compulsory + float(solved.fun)
    return Bound(loads, part.compulsory, part.total, method, weight)


def optimum(trace: Trace, capacity_bytes: int, weight: Weight = "requests", *, warmup: int = 0) -> Bound:
    """The best bound that is cheap: exact (Belady with bypass) when all sizes are equal, else PFOO-L."""
    from tiercache.policies.simulate import run_tier
    from tiercache.policies.spec import Tier

    _check(trace, capacity_bytes)
    sizes = trace.requests["size"]
    costs = _weights(trace.requests, weight)
    plain = bool((trace.requests["op"] == GET).all())
    if not (plain and (sizes == sizes[0]).all() and (weight != "cost" or (costs == costs[0]).all())):
        return pfoo_l(trace, capacity_bytes, weight, warmup=warmup)
    played = run_tier(
        with_next_uses(trace), Tier(capacity_bytes=capacity_bytes, policy="belady_bypass"), warmup=warmup
    )
    first = np.unique(trace.requests["id"], return_index=True)[1]
    each = float(costs[0])
    compulsory = each * int((first >= warmup).sum())
    total = each * (len(trace) - warmup)
    return Bound(each * played.counts.misses, compulsory, total, "exact", weight)


def _check(trace: Trace, capacity_bytes: int) -> None:
    if capacity_bytes <= 0:
        raise TraceError("bound: capacity_bytes must be positive", got=capacity_bytes)
    if len(trace) == 0:
        raise TraceError(f"{trace.source}: the trace is empty", got="no requests")
