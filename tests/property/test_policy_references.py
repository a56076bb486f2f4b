"""The engine against plain references, access by access, with sizes, costs, leases and removals."""

import random

import numpy as np
import pytest
from policy_references import REFERENCES

from tiercache.policies import base, create_policy
from tiercache.policies.simulate import Tier, make_policy
from tiercache.policies.traces import make_trace, with_next_uses


def random_trace(seed, count=1500, pages=60, resize=False):
    """Lookups with popularity, mixed with removals and leases that end."""
    rng = np.random.default_rng(seed)
    sizes = rng.integers(1, 12, pages)
    costs = rng.uniform(0.1, 5.0, pages)
    keys, ops, held = [], [], []
    for _ in range(count):
        page = int(pages * rng.random() ** 2)
        draw = rng.random()
        if draw < 0.04:
            keys.append(page)
            ops.append(base.REMOVE)
            held = [k for k in held if k != page]
        elif draw < 0.07 and len(held) < 3:
            keys.append(page)
            ops.append(base.LEASE)
            held.append(page)
        elif draw < 0.11 and held:
            keys.append(held.pop(0))
            ops.append(base.RELEASE)
        else:
            keys.append(page)
            ops.append(base.GET)
    keys = np.array(keys)
    told = sizes[keys].copy()
    if resize:
        told[rng.random(count) < 0.2] += 1
    return with_next_uses(make_trace(keys, told, costs=costs[keys], ops=ops, resize="each"))


def play_reference(kind, trace, capacity):
    """Which lookups hit, and who was resident after each request."""
    policy = kind(capacity)
    hits, states = [], []
    for now, request in enumerate(trace.requests):
        k, op, size = int(request["id"]), int(request["op"]), int(request["size"])
        policy.now = now
        if op == base.REMOVE:
            policy.on_remove(k)
            policy.resident.discard(k)
            policy.leases.pop(k, None)
            policy.next_uses[k] = base.NEVER
        elif op in (base.LEASE, base.RELEASE):
            policy.leases[k] = policy.leases.get(k, 0) + (1 if op == base.LEASE else -1)
            policy.next_uses[k] = int(request["next_use"])
        else:
            policy.next_uses[k] = int(request["next_use"])
            found = k in policy.resident
            hits.append(found)
            if found:
                policy.on_hit(k)
                policy.leases[k] = policy.leases.get(k, 0) + 1
                shed(policy)
                policy.leases[k] -= 1
            else:
                policy.sizes[k], policy.costs[k] = size, float(request["cost"])
                fetch(policy, k, size)
        states.append(set(policy.resident))
    return hits, states


def fetch(policy, k, size):
    if size > policy.capacity or not policy.admit(k):
        return
    policy.on_miss(k)
    need = policy.used + size - policy.capacity
    leased = policy.bytes_of(r for r in policy.resident if policy.leases.get(r))
    if need > 0 and policy.used - leased < need:
        return
    policy.incoming = k
    policy.first_round = True
    while policy.used + size > policy.capacity or policy.over:
        victim = policy.victim()
        policy.first_round = False
        if victim == k:
            policy.incoming = None
            return
        if victim is None:  # it only wished to give up more
            break
        policy.on_evict(victim)
        policy.resident.discard(victim)
    policy.incoming = None
    policy.on_insert(k)
    policy.resident.add(k)


def shed(policy):
    while policy.over:
        victim = policy.victim()
        if victim is None:
            break
        policy.on_evict(victim)
        policy.resident.discard(victim)


def play_engine(name, trace, capacity):
    params = {"hir_share": REFERENCES[name].share} if name == "lirs" else {}
    policy = make_policy(trace, Tier(capacity_bytes=capacity, policy=name, params=params))
    requests = trace.requests.copy()
    events = np.empty(trace.num_objects + 8, base.REQUEST)
    states = []
    for i in range(len(requests)):
        assert policy.run(requests, events, i, i + 1) == i + 1
        states.append(set(policy.resident()))
        policy.check_integrity()
    return requests["hit"][requests["op"] == base.GET].astype(bool).tolist(), states


@pytest.mark.parametrize("name", REFERENCES)
@pytest.mark.parametrize("seed", range(3))
def test_every_access_agrees(name, seed):
    trace = random_trace(seed)
    capacity = 120 + 40 * seed
    hits, states = play_reference(REFERENCES[name], trace, capacity)
    ours, our_states = play_engine(name, trace, capacity)
    for i, (expected, found) in enumerate(zip(states, our_states, strict=True)):
        assert expected == found, f"request {i}: {trace.requests[i]}"
    assert ours == hits


@pytest.mark.long
@pytest.mark.parametrize("name", REFERENCES)
@pytest.mark.parametrize("seed", range(100, 140))
def test_every_access_agrees_on_many_traces(name, seed):
    trace = random_trace(seed, count=3000, pages=30 + seed % 80)
    capacity = 60 + 7 * (seed % 40)
    assert play_reference(REFERENCES[name], trace, capacity)[1] == play_engine(name, trace, capacity)[1]


COSTS = {
    "measured": lambda rng, size: rng.uniform(0, 5),
    "equal": lambda rng, size: 1.0,
    "few": lambda rng, size: rng.choice([1, 2, 3]),
    "by bytes": lambda rng, size: size / 7 * rng.choice([1, 1, 4]),
}


def greatest(pages, now, passed_over):
    """The page with the greatest size x distance / cost by a scan; of equals the one that was used longest ago."""

    def rank(k):
        size, cost, when, used = pages[k]
        score = 1e300 if when is None or when < now else size / (cost + 1e-12) * float(when - now)
        return score, -used

    return max((k for k in pages if k not in passed_over), key=rank, default=None)


@pytest.mark.parametrize("costs", COSTS)
@pytest.mark.parametrize("seed", range(3))
def test_planned_finds_what_a_scan_finds_as_time_goes_on(costs, seed):
    """Scores cross without any page being touched; time jumps and goes back; many are chosen at once."""
    rng = random.Random(seed)
    policy = create_policy("planned", capacity_bytes=10**9, max_entries=4)
    pages, told, leased, now, chosen = {}, {}, set(), 0, 0
    for step in range(1500):
        draw, k = rng.random(), rng.randrange(120)
        page = rng.choice(list(pages)) if pages else None
        if draw < 0.35 or page is None:
            if k not in pages:
                size = 100 if costs == "equal" else rng.randrange(1000)
                cost = COSTS[costs](rng, size)
                policy.insert(k, size, cost)
                pages[k] = [size, cost, told.get(k), step]
        elif draw < 0.6:
            pages[page][2] = told[page] = rng.choice(
                [None, now + rng.randrange(50), now + rng.randrange(5000)]
            )
            policy.set_next_use(page, told[page])
        elif draw < 0.7:
            policy.hit(page)
            pages[page][3] = step
        elif draw < 0.75:
            if page in leased or len(leased) < 10:
                (policy.release if page in leased else policy.lease)(page)
                leased ^= {page}
        elif draw < 0.8:
            now += rng.choice([1, 1, 2, 30])
            policy.advance(now)
        elif draw < 0.803 and now:
            now = rng.randrange(now)
            policy.advance(now)
            told = {}
            for known in pages.values():
                known[2] = None
        elif draw < 0.82:
            policy.remove(page)
            told.pop(page, None)
            leased.discard(page)
            del pages[page]
        else:
            free = sorted(known[0] for k, known in pages.items() if k not in leased)
            need = sum(free[: rng.choice([1, 1, 3, 9])]) + 1
            expected, freed = [], 0
            while freed < need <= sum(free):
                expected.append(greatest(pages, now, leased | set(expected)))
                freed += pages[expected[-1]][0]
            assert policy.victims(need) == expected, f"step {step}"
            chosen += len(expected)
            for gone in expected[: rng.randrange(3)]:
                policy.evict(gone, 1)
                del pages[gone]
        policy.check_integrity()
    assert chosen > 100
