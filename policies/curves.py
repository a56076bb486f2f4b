"""Miss-ratio curves: exact, or sampled with an error bound.

Exact LRU curves take one pass of byte-weighted stack distances (Mattson et al., 1970); other policies one run a
capacity. Sampled: SHARDS (Waldspurger et al., FAST 2015) keeps the pages whose hash is below a threshold and scales
distances up; other policies run scaled down (Waldspurger et al., "Cache modeling and optimization using miniature
simulations", ATC 2017): the same pages against a capacity scaled by the same rate.
The bound is 1.96 standard errors of a ratio estimated from a sample of pages (each page with all of its requests),
times 1 - rate: where few pages are sampled, or few of them carry the trace, it is wide and says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tiercache.policies.base import GET, TAKE, compiled
from tiercache.policies.errors import TraceError
from tiercache.policies.simulate import Progress, run_tier
from tiercache.policies.spec import Tier
from tiercache.policies.traces.base import Trace

Floats = npt.NDArray[np.float64]
INFINITE = 1 << 62


@dataclass(frozen=True, slots=True)
class Curve:
    """A miss-ratio curve: by requests and by bytes, with the half width of a 95 % interval (0 when exact)."""

    policy: str
    capacities: npt.NDArray[np.int64]
    miss_ratio: Floats
    byte_miss_ratio: Floats
    error: Floats
    rate: float = 1.0


@compiled
def _distances(ids: Any, sizes: Any, last: Any, tree: Any, out: Any) -> None:
    """Bytes of other pages used since the page's last use, plus its own; INFINITE at the first use."""
    count = len(ids)
    for i in range(count):
        k = ids[i]
        before = last[k]
        if before < 0:
            out[i] = INFINITE
        else:
            total = np.int64(0)
            j = i
            while j > 0:
                total += tree[j]
                j -= j & -j
            j = before + 1
            while j > 0:
                total -= tree[j]
                j -= j & -j
            out[i] = total + sizes[i]
            j = before + 1
            while j <= count:
                tree[j] -= sizes[before]
                j += j & -j
        j = i + 1
        while j <= count:
            tree[j] += sizes[i]
            j += j & -j
        last[k] = i


def stack_distances(trace: Trace) -> npt.NDArray[np.int64]:
    """Byte-weighted LRU stack distance of each request."""
    _need_plain(trace)
    out = np.empty(len(trace), np.int64)
    last = np.full(trace.num_objects, -1, np.int64)
    tree = np.zeros(len(trace) + 1, np.int64)
    _distances(trace.requests["id"].astype(np.int64), trace.requests["size"].copy(), last, tree, out)
    return out


def _need_plain(trace: Trace) -> None:
    if len(trace) == 0:
        raise TraceError(f"{trace.source}: the trace is empty", got="no requests")
    if (trace.requests["op"] != GET).any():
        raise TraceError(
            f"{trace.source}: a curve by stack distances needs lookups alone",
            remedy="use run_curve, which plays the trace at each capacity",
        )


def sample_ids(trace: Trace, rate: float, seed: int = 0) -> npt.NDArray[np.bool_]:
    """Which ids a spatial sample keeps: those whose hash (of the dense id) is below the rate."""
    if not 0 < rate <= 1:
        raise TraceError("sample: rate", got=rate, limit="0 to 1")
    x = np.arange(trace.num_objects, dtype=np.uint64) + np.uint64(0x9E3779B97F4A7C15 * (seed + 1) % (1 << 64))
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)  # splitmix64
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    x ^= x >> np.uint64(31)
    kept: npt.NDArray[np.bool_] = (x >> np.uint64(11)).astype(np.float64) < rate * float(1 << 53)
    return kept


def _error(ids: npt.NDArray[Any], missed: Floats, weight: Floats, pages: int, rate: float) -> float:
    """1.96 standard errors of sum(missed) / sum(weight) over a sample of pages."""
    if rate >= 1:
        return 0.0
    per_page = np.bincount(ids, weight, pages)
    ratio = missed.sum() / max(weight.sum(), 1e-12)
    residual = np.bincount(ids, missed, pages) - ratio * per_page
    variance = pages / max(pages - 1, 1) * float((residual**2).sum()) * (1 - rate)
    return 1.96 * float(np.sqrt(variance)) / max(float(per_page.sum()), 1e-12)


def sampling_error(part: Trace, hits: npt.NDArray[np.bool_], rate: float, warmup: int = 0) -> float:
    """Half the width of a 95 % interval of the miss ratio that a run of a sample counted; 0 at rate 1."""
    counted = np.isin(part.requests["op"], (GET, TAKE)).astype(np.float64)
    counted[:warmup] = 0
    return _error(part.requests["id"], ~hits * counted, counted, part.num_objects, rate)


def lru_curve(trace: Trace, capacities: Sequence[int], rate: float = 1.0, seed: int = 0) -> Curve:
    """LRU's curve: exact at rate 1, SHARDS below it."""
    _need_plain(trace)
    part = trace if rate >= 1 else trace.select(sample_ids(trace, rate, seed))
    if len(part) == 0:
        raise TraceError(
            f"{trace.source}: no page is in the sample", got=f"rate {rate}", remedy="raise the rate"
        )
    distances = stack_distances(part)
    sizes = part.requests["size"].astype(np.float64)
    scaled = np.where(distances >= INFINITE, np.inf, distances / rate)
    return _make("lru", part, capacities, [(scaled > c).astype(np.float64) for c in capacities], sizes, rate)


def run_curve(
    trace: Trace,
    policy: str,
    capacities: Sequence[int],
    *,
    rate: float = 1.0,
    seed: int = 0,
    progress: Progress | None = None,
    **tier: Any,
) -> Curve:
    """Any policy's curve by playing it: exact at rate 1, a scaled-down simulation below it."""
    part = trace if rate >= 1 else trace.select(sample_ids(trace, rate, seed))
    if len(part) == 0:
        raise TraceError(
            f"{trace.source}: no page is in the sample", got=f"rate {rate}", remedy="raise the rate"
        )
    missed = []
    for capacity in capacities:
        scaled = Tier(capacity_bytes=max(1, round(capacity * rate)), policy=policy, **tier)
        hits = run_tier(part, scaled, oversize="refuse", progress=progress).hits
        missed.append((~hits).astype(np.float64))
    return _make(policy, part, capacities, missed, part.requests["size"].astype(np.float64), rate)


def _make(
    policy: str, part: Trace, capacities: Sequence[int], missed: list[Floats], sizes: Floats, rate: float
) -> Curve:
    counted = (part.requests["op"] == GET).astype(np.float64)
    ids = part.requests["id"]
    total, total_bytes = max(counted.sum(), 1), max((sizes * counted).sum(), 1)
    return Curve(
        policy,
        np.asarray(capacities, np.int64),
        np.array([(m * counted).sum() / total for m in missed]),
        np.array([(m * sizes * counted).sum() / total_bytes for m in missed]),
        np.array([_error(ids, m * counted, counted, part.num_objects, rate) for m in missed]),
        rate,
    )
