"""Bounds against brute force, curves against runs, samples against their own error bound."""

import itertools

import numpy as np
import pytest

from tiercache.policies import base
from tiercache.policies.curves import lru_curve, run_curve, stack_distances
from tiercache.policies.offline import foo, optimum, pfoo_l
from tiercache.policies.simulate import Tier, run_tier
from tiercache.policies.traces import make_trace, read_trace, with_next_uses


def brute_force(trace, capacity, weights, *, forced=False, pinned=()):
    """Least weight of loads over all choices of resident sets. `pinned`: (page, first, last request) held."""
    ids, sizes = trace.requests["id"].tolist(), trace.requests["size"].tolist()
    size = dict(zip(ids, sizes, strict=True))
    best = {frozenset(): 0.0}
    for t, page in enumerate(ids):
        held = {p for p, a, b in pinned if a <= t < b}
        after: dict[frozenset, float] = {}
        for inside, cost in best.items():
            loaded = cost + (0.0 if page in inside else weights[t])
            pool = sorted(inside | {page})
            for n in range(len(pool) + 1):
                for kept in itertools.combinations(pool, n):
                    if sum(size[k] for k in kept) > capacity:
                        continue
                    if (forced and page not in kept) or not (held & set(pool)) <= set(kept):
                        continue
                    state = frozenset(kept)
                    if loaded < after.get(state, float("inf")):
                        after[state] = loaded
        best = after
    return min(best.values())


@pytest.mark.parametrize("seed", range(12))
def test_no_bound_claims_more_than_the_optimum(seed):
    rng = np.random.default_rng(seed)
    sizes, costs = rng.integers(1, 5, 6), rng.uniform(0.5, 4, 6)
    keys = rng.integers(0, 6, 14)
    trace = with_next_uses(make_trace(keys, sizes[keys], costs=costs[keys]))
    capacity = int(rng.integers(4, 9))
    weights = {"requests": np.ones(14), "bytes": sizes[keys].astype(float), "cost": costs[keys]}
    for weight, values in weights.items():
        best = brute_force(trace, capacity, values)
        forced = brute_force(trace, capacity, values, forced=True)
        flow = foo(trace, capacity, weight)
        area = pfoo_l(trace, capacity, weight)
        tight = foo(trace, capacity, weight, pinned=True)
        assert area.compulsory - 1e-9 <= area.loads <= flow.loads + 1e-6
        assert flow.loads <= best + 1e-6
        assert flow.loads - 1e-6 <= tight.loads <= forced + 1e-6
        assert pfoo_l(trace, capacity, weight, pinned=True).loads <= tight.loads + 1e-6


@pytest.mark.parametrize("seed", range(6))
def test_equal_sizes_are_exact(seed):
    keys = np.random.default_rng(seed).integers(0, 7, 20)
    trace = with_next_uses(make_trace(keys))
    ones = np.ones(20)
    exact = optimum(trace, 3)
    assert exact.method == "exact"
    assert exact.loads == brute_force(trace, 3, ones)
    assert foo(trace, 3).loads == pytest.approx(exact.loads)
    forced = run_tier(trace, Tier(capacity_bytes=3, policy="belady")).counts.misses
    assert forced == brute_force(trace, 3, ones, forced=True)
    assert foo(trace, 3, pinned=True).loads == pytest.approx(forced)


def test_the_pinned_bound_knows_leases():
    """Page 9 is held from request 1 to 6 and leaves room for one page of two."""
    keys = [9, 9, 0, 1, 0, 1, 9]
    ops = [base.GET, base.LEASE, base.GET, base.GET, base.GET, base.GET, base.RELEASE]
    trace = make_trace(keys, [2, 2, 1, 1, 1, 1, 2], ops=ops)
    assert foo(trace, 3).loads == 3
    assert foo(trace, 3, pinned=True).loads == 5
    assert 3 <= pfoo_l(trace, 3, pinned=True).loads <= 5


def zipf(count=20000, pages=3000, seed=1):
    rng = np.random.default_rng(seed)
    keys = rng.zipf(1.15, count) % pages
    sizes = rng.integers(1, 50, pages)
    return make_trace(keys, sizes[keys])


def test_stack_distances_are_those_of_lru():
    trace = zipf(3000, 400)
    capacities = [300, 1200, 5000]
    exact = lru_curve(trace, capacities)
    distances = stack_distances(trace)
    for capacity, ratio in zip(capacities, exact.miss_ratio, strict=True):
        assert (distances > capacity).mean() == ratio
        played = run_tier(make_trace(trace.requests["id"], 1), Tier(capacity_bytes=capacity))
        assert played.counts.miss_ratio <= ratio  # smaller pages can only hit more
    unit = make_trace(trace.requests["id"], 1)
    for size in (10, 100):
        assert (
            lru_curve(unit, [size]).miss_ratio[0]
            == run_tier(unit, Tier(capacity_bytes=size)).counts.miss_ratio
        )


def test_samples_keep_their_error_bound():
    trace = zipf()
    capacities = [trace.footprint_bytes // share for share in (4, 16)]
    exact = lru_curve(trace, capacities)
    inside = 0
    for seed in range(20):
        sampled = lru_curve(trace, capacities, rate=0.2, seed=seed)
        inside += int((abs(sampled.miss_ratio - exact.miss_ratio) <= sampled.error).sum())
    assert exact.error.tolist() == [0, 0]
    assert inside >= 34  # 95 % of 40, less chance
    scaled = run_curve(trace, "lru", capacities, rate=0.2)
    assert (abs(scaled.miss_ratio - exact.miss_ratio) <= scaled.error + 0.02).all()


@pytest.mark.data
def test_bounds_of_a_public_trace(trace_data):
    trace = read_trace(trace_data / "cloudPhysicsIO.oracleGeneral.bin")
    part = with_next_uses(trace.part(0, 4000))
    capacity = 8 << 20
    bypass = run_tier(part, Tier(capacity_bytes=capacity, policy="belady_bypass")).counts.misses
    assert pfoo_l(part, capacity).loads <= foo(part, capacity).loads <= bypass
