"""Plays traces against policies: one tier, or several from top to bottom.

Notes. What a tier does never depends on the tiers below it: a page that it misses comes from somewhere, always. So
tiers are played one after the other; each writes the lookups it missed and the pages it gave up, in order, and that
is the next tier's trace. Exclusive: a page found below moves up and leaves its place; inclusive: it stays there too,
and giving it up later moves no bytes while it is still there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from tiercache.policies import base, load_hooks
from tiercache.policies.engine import OnlinePolicy
from tiercache.policies.errors import PolicyError, TraceError
from tiercache.policies.spec import Counts, Tier
from tiercache.policies.traces.base import Trace, with_next_uses

Demotion = Literal["exclusive", "inclusive"]
CHUNK = 1 << 18
Progress = Callable[[int], None]


_WORDS = (
    base.HITS, base.MISSES, base.HIT_BYTES, base.MISS_BYTES, base.INSERTS, base.INSERTED_BYTES,
    base.EVICTIONS, base.EVICTED_BYTES, base.REFUSED, base.REFUSED_BYTES,
)  # fmt: skip


def _totals(policy: OnlinePolicy) -> tuple[list[int], list[float]]:
    m = [int(policy.M[word]) for word in _WORDS]
    return m, [float(policy.F[word]) for word in (base.COST_HIT, base.COST_MISS)]


def _counts(policy: OnlinePolicy, before: tuple[list[int], list[float]]) -> Counts:
    after = _totals(policy)
    m = [now - old for now, old in zip(after[0], before[0], strict=True)]
    f = [now - old for now, old in zip(after[1], before[1], strict=True)]
    return Counts(*m[:4], *f, *m[4:])


@dataclass(frozen=True, slots=True)
class Played:
    """One tier's run: its counts, which requests hit, its final state, and (if asked for) the next tier's trace.

    `events` has the same ids as the trace; `event_times` says at which of its requests each event happened.
    """

    counts: Counts
    hits: npt.NDArray[np.bool_]
    policy: OnlinePolicy
    events: npt.NDArray[Any] | None
    event_times: npt.NDArray[np.int64] | None


def make_policy(trace: Trace, tier: Tier, cost: tuple[float, float] = (1.0, 0.0)) -> OnlinePolicy:
    """The tier's policy, sized for the trace. `cost`: seconds of a reload, fixed and per byte, where not recorded."""
    hooks, defaults = load_hooks(tier.policy)
    params = {**defaults, **tier.params}
    if hooks.oracle and not trace.has_next_uses:
        raise PolicyError(
            f"policy {tier.policy} needs next uses and {trace.source} has none",
            remedy="find them first: with_next_uses(trace)",
        )
    prepare = getattr(hooks.module, "prepare", None)
    if prepare is not None:
        _check_next_uses(trace)
        params.setdefault("horizon", len(trace))
    policy = OnlinePolicy(
        hooks,
        capacity_bytes=tier.capacity_bytes,
        max_entries=trace.num_objects,
        admission=tier.admission,
        admission_limit=tier.admission_limit,
        **params,
    )
    if prepare is not None:
        prepare(policy.M, trace.requests["id"])
    policy.F[base.COST_FIXED], policy.F[base.COST_PER_BYTE] = cost
    return policy


def _check_next_uses(trace: Trace) -> None:
    ids, after = trace.requests["id"], trace.requests["next_use"]
    known = np.flatnonzero(after < base.NEVER)
    wrong = known[
        (after[known] >= len(trace)) | (ids[np.minimum(after[known], len(trace) - 1)] != ids[known])
    ]
    if len(wrong):
        raise TraceError(
            f"{trace.source}: the next use that record {wrong[0]} tells is another page's",
            got=int(after[wrong[0]]),
            remedy="find next uses anew: with_next_uses(trace)",
        )


def run_tier(
    trace: Trace,
    tier: Tier,
    *,
    warmup: int = 0,
    cost: tuple[float, float] = (1.0, 0.0),
    emit: Demotion | None = None,
    atomic: bool = False,
    oversize: Literal["error", "refuse"] = "error",
    progress: Progress | None = None,
) -> Played:
    """Plays a trace against one tier.

    Args:
        trace: requests; its ids stay.
        tier: the tier.
        warmup: leading requests that are played and not counted.
        cost: seconds of a reload, fixed and per byte, for requests that tell none.
        emit: write events for the next tier.
        atomic: choose all victims of a request before the first is evicted, as the store does.
        oversize: what a page larger than the tier is: an "error", or "refuse"d in silence.
        progress: called with the number of requests after each chunk.

    Raises:
        PolicyError: the policy's parameters or hooks are wrong.
        TraceError: the trace is empty, or a page is larger than the tier.
    """
    if len(trace) == 0:
        raise TraceError(f"{trace.source}: the trace is empty", got="no requests")
    requests = trace.requests.copy()
    if oversize == "error":
        _check_sizes(trace, tier)
    policy = make_policy(trace, tier, cost)
    policy.M[base.FLAGS] = (base.EMIT if emit else 0) | (base.ATOMIC if atomic else 0)
    policy.M[base.LOOKUP] = base.GET if emit == "inclusive" else base.TAKE
    events = np.empty(trace.num_objects + 8 + (2 * CHUNK if emit else 0), base.REQUEST)
    pieces: list[npt.NDArray[Any]] = []
    before: tuple[list[int], list[float]] = ([0] * len(_WORDS), [0.0, 0.0])
    done = 0
    while done < len(requests):
        stop = min(done + CHUNK, len(requests))
        if done < warmup:
            stop = min(stop, warmup)
        reached = policy.run(requests, events, done, stop)
        if emit:
            pieces.append(events[: policy.M[base.EVENTS]].copy())
            policy.M[base.EVENTS] = 0
        if progress is not None:
            progress(reached - done)
        done = reached
        if done == warmup:
            before = _totals(policy)
    counts = _counts(policy, before)
    told, times = _next_trace(pieces) if emit else (None, None)
    return Played(counts, requests["hit"].astype(bool), policy, told, times)


def _next_trace(pieces: list[npt.NDArray[Any]]) -> tuple[npt.NDArray[Any], npt.NDArray[np.int64]]:
    """The events as the next tier's requests, and when each happened: the engine tells it as the next use."""
    told = np.concatenate(pieces)
    times = told["next_use"].copy()
    told["next_use"] = -1
    told["cost"] = np.nan
    told["tag"] = 0
    return told, times


def _check_sizes(trace: Trace, tier: Tier) -> None:
    wanted = np.isin(trace.requests["op"], (base.GET, base.PUT))
    large = np.flatnonzero(wanted & (trace.requests["size"] > tier.capacity_bytes))
    if len(large):
        raise TraceError(
            f"{trace.source}: record {large[0]} is larger than tier {tier.name}",
            got=f"{trace.requests['size'][large[0]]} bytes",
            limit=f"{tier.capacity_bytes} bytes",
            remedy='play it with oversize="refuse" (--oversize refuse) to count such pages as missed',
        )


@dataclass(frozen=True, slots=True)
class Result:
    """A simulation of one or more tiers.

    Attributes:
        tiers: as given.
        counts: of each tier: lookups that reached it, and what entered and left it.
        stall_s: seconds that reads from below the first tier take, one after the other.
        moved_up_bytes: bytes read from each tier into the first one; the last entry is the source.
        moved_down_bytes: bytes written into each tier below the first by demotion.
        hits: which requests the first tier had.
    """

    tiers: tuple[Tier, ...]
    counts: tuple[Counts, ...]
    stall_s: float
    moved_up_bytes: tuple[int, ...]
    moved_down_bytes: tuple[int, ...]
    hits: npt.NDArray[np.bool_]


def simulate(
    trace: Trace,
    tiers: Sequence[Tier],
    *,
    demotion: Demotion = "exclusive",
    source_latency_s: float = 1.0,
    source_bytes_per_s: float = float("inf"),
    warmup: int = 0,
    oversize: Literal["error", "refuse"] = "error",
    progress: Progress | None = None,
) -> Result:
    """Plays a trace against tiers, from top to bottom.

    A page that no tier has comes from the source; costs that the trace recorded are the source's. Without any
    times given, a load from the source counts one second, so that stall is the number of misses.
    """
    counts: list[Counts] = []
    hits = np.zeros(len(trace), bool)
    current, origin = trace, np.arange(len(trace))
    for level, tier in enumerate(tiers):
        last = level == len(tiers) - 1
        below = tiers[level + 1] if not last else None
        cost = (
            (source_latency_s, 1 / source_bytes_per_s)
            if below is None
            else (below.latency_s, 1 / below.bytes_per_s)
        )
        if load_hooks(tier.policy)[0].oracle and level > 0:
            current = with_next_uses(current)
        start = int(np.searchsorted(origin, warmup))
        played = run_tier(
            current if below is None or level else _without_costs(current),
            tier,
            warmup=start,
            cost=cost,
            emit=None if last else demotion,
            oversize=oversize if level == 0 else "refuse",
            progress=progress if level == 0 else None,
        )
        counts.append(played.counts)
        if level == 0:
            hits = played.hits
        if played.events is not None and played.event_times is not None:
            if len(played.events) == 0:
                counts += [Counts(0, 0, 0, 0, 0.0, 0.0, 0, 0, 0, 0, 0, 0)] * (len(tiers) - level - 1)
                break
            if below is tiers[-1]:
                _give_costs(played.events, trace)
            current = Trace(played.events, trace.keys, f"{trace.source} below {tier.name}")
            origin = origin[played.event_times]
    stall = sum(
        c.hits * t.latency_s + c.hit_bytes / t.bytes_per_s for c, t in zip(counts[1:], tiers[1:], strict=True)
    )
    stall += counts[-1].miss_cost_s
    up = (*(c.hit_bytes for c in counts[1:]), counts[-1].miss_bytes)
    down = tuple(c.inserted_bytes for c in counts[1:])
    return Result(tuple(tiers), tuple(counts), stall, up, down, hits)


def _without_costs(trace: Trace) -> Trace:
    if np.isnan(trace.requests["cost"]).all():
        return trace
    requests = trace.requests.copy()
    requests["cost"] = np.nan
    return Trace(requests, trace.keys, trace.source, trace.times_s, trace.tags)


def _give_costs(events: npt.NDArray[Any], trace: Trace) -> None:
    cost = np.full(trace.num_objects, np.nan)
    cost[trace.requests["id"]] = trace.requests["cost"]
    events["cost"] = cost[events["id"]]
