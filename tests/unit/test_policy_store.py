"""Policies inside the store: by name and tier, admission, and the same victims when its trace is replayed."""

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from tiercache import PageKey, StoreConfig, TierStore, open_store
from tiercache.errors import ConfigError, PolicyError, TierFullError, TraceError
from tiercache.plan import Access, AccessPlan
from tiercache.policies import POLICIES, base, create_policy
from tiercache.policies.recorded import read_recorded, replay
from tiercache.policies.simulate import Tier, run_tier
from tiercache.policies.traces import read_trace, with_next_uses

PAGE = 4096


def key(number, kind="value", graph=0):
    return PageKey(node=number.to_bytes(32, "little"), layer=0, kind=kind, graph=graph)


def page(number, size=PAGE):
    return torch.full((size,), number % 251, dtype=torch.uint8)


def work(store, seed, count=300):
    """Puts of many sizes, reads, overlapping leases, sums, takes, discards and a plan now and then."""
    rng = np.random.default_rng(seed)
    held, graph = [], store.new_graph()
    for step in range(count):
        number = int(40 * rng.random() ** 2)
        draw = rng.random()
        if draw < 0.04:
            store.discard([key(number)])
        elif draw < 0.10:
            store.accumulate(key(number, "grad_value", graph), torch.ones(256 + 64 * number))
        elif draw < 0.13:
            store.take(key(number, "grad_value", graph))
        elif draw < 0.16 and len(held) < 2 and store.contains(key(number)):
            held.append(store.read(key(number)))
        elif draw < 0.20 and held:
            held.pop(0).release()
        elif step == count // 3:
            order = [int(n) for n in rng.integers(0, 40, 60)]
            store.follow(AccessPlan([Access("read", key(n), PAGE) for n in order]))
        elif step == 2 * count // 3:
            store.discard(graph=graph)
            store.follow(None)
        elif not store.contains(key(number)):
            store.put(key(number), page(number, 1024 * (1 + number % 7)))
        else:
            with store.read(key(number)) as lease:
                assert lease.tensor[0] == number % 251
    for lease in held:
        lease.release()
    store.check_integrity()


@pytest.mark.parametrize("name", POLICIES)
def test_a_recorded_trace_replays_to_identical_victims(tmp_path, name):
    """Every tier's policy, with worker threads, leases, sums, discards, plans and pages of many sizes."""
    path = tmp_path / "run.parquet"
    admission = {"device": "ghost", "host": "second_hit"} if name in ("lru", "gdsf") else "always"
    options = {"device": 16 * PAGE, "host": 24 * PAGE, "policy": name, "admission": admission}
    disk = {"disk": tmp_path / "disk", "disk_capacity": "64MiB"}
    with open_store(**options, **disk, trace=path) as store:
        work(store, seed=len(name))
    recorded = read_recorded(path)
    assert [tier.tier for tier in recorded] == ["device", "host"]
    for tier in recorded:
        assert tier.policy == name
        assert sum(map(len, tier.victims)) > 20
        victims, admitted = replay(tier)
        assert victims == tier.victims
        assert admitted == tier.admitted
    assert not isinstance(admission, dict) or {True, False} == {*recorded[1].admitted}


def test_a_lost_row_would_be_noticed(tmp_path):
    """The replay depends on every row: without one use the victims differ."""
    path = tmp_path / "run.parquet"
    with open_store(device=16 * PAGE, host=64 * PAGE, policy="lru", trace=path) as store:
        work(store, seed=5)
    table = pq.read_table(path)
    ops = table["op"].to_pylist()
    uses = [i for i, op in enumerate(ops) if op == "hit"]
    pq.write_table(table.take([i for i in range(len(ops)) if i not in set(uses[::3])]), path)
    device = read_recorded(path)[0]
    assert replay(device)[0] != device.victims


@pytest.mark.parametrize("name", ["fifo", "lru", "lfu"])
def test_accesses_alone_replay_where_no_thread_decides(tmp_path, name):
    """A policy that choosing does not change, pages of one size, nothing leased: the simulator needs accesses only."""
    path = tmp_path / "run.parquet"
    rng = np.random.default_rng(7)
    with open_store(device=8 * PAGE, host=1 << 20, policy=name, trace=path) as store:
        for number in (40 * rng.random(400) ** 2).astype(int).tolist():
            if not store.contains(key(number)):
                store.put(key(number), page(number))
            else:
                store.read(key(number)).release()
            store.flush()  # what is being copied down cannot be a victim
            if rng.random() < 0.05:
                store.discard([key(int(rng.integers(40)))])
    device = read_recorded(path)[0]
    evicted = [int(k) for k in device.ids[device.ops == "evict"]]
    trace = read_trace(path)
    assert (trace.requests["size"] == PAGE).all()
    cost = (0.0, 1.0)  # as the store: a reload takes as long as it has bytes
    played = run_tier(
        trace, Tier(capacity_bytes=8 * PAGE, policy=name), cost=cost, emit="exclusive", atomic=True
    )
    table = pq.read_table(path)
    rows = [(op, i, k) for op, i, k in zip(*(table[c].to_pylist() for c in ("op", "id", "key")), strict=True)]
    by_key = [k for op, i, k in rows if op == "evict"]
    assert len(by_key) == len(evicted) > 100
    again = played.events["id"][played.events["op"] == base.PUT]
    assert [int(trace.keys[k]) for k in again] == by_key


def test_a_trace_says_sizes_and_ends_of_pages(tmp_path):
    path = tmp_path / "run.parquet"
    with open_store(device="1MiB", host="1MiB", trace=path) as store:
        graph = store.new_graph()
        store.put(key(1), torch.zeros(100))
        store.put(key(1), torch.zeros(100))
        store.accumulate(key(2, "grad_value", graph), torch.zeros(10, dtype=torch.bfloat16))
        store.accumulate(key(3, "grad_value", graph), torch.zeros(10, dtype=torch.float64))
        store.discard([key(1)])
        assert store.contains(key(1))
        store.take(key(1))
        store.discard_later([key(9)])
        store.discard(graph=graph)
    trace = read_trace(path)
    names = {base.PUT: "put", base.REMOVE: "end", base.TAKE: "take", base.GET: "read"}
    rows = [(names[int(r["op"])], int(r["id"]), int(r["size"])) for r in trace.requests]
    assert rows[:5] == [("put", 0, 400), ("put", 0, 400), ("put", 1, 40), ("put", 2, 80), ("take", 0, 400)]
    assert sorted(rows[5:]) == [("end", 0, 400), ("end", 1, 40), ("end", 2, 80)]
    assert with_next_uses(trace).requests["next_use"][0] == 4


def test_a_trace_that_knows_nothing_of_policies_is_named(tmp_path):
    path = tmp_path / "run.parquet"
    with open_store(device="1MiB", trace=path) as store:
        store.put(key(1), page(1))
    pq.write_table(pq.read_table(path).replace_schema_metadata(None), path)
    with pytest.raises(TraceError, match="does not say what policies were asked"):
        read_recorded(path)
    with pytest.raises(TraceError, match="no such trace"):
        read_recorded(tmp_path / "none.parquet")


def tiers_of(store, number):
    entry = store._books.table[key(number)]
    return {store._books.tiers[level].name for level, place in enumerate(entry.places) if place is not None}


def three_tiers(tmp_path, **options):
    return open_store(
        device=4 * PAGE, host=16 * PAGE, disk=tmp_path, disk_capacity="64MiB", policy="lru", **options
    )


def test_what_the_host_refuses_goes_to_the_disk_and_comes_back(tmp_path):
    with three_tiers(tmp_path, admission={"host": "size"}, admission_limit={"host": "2KiB"}) as store:
        for number in range(8):
            store.put(key(number), page(number, PAGE if number % 2 else PAGE // 2))
        store.flush()
        below = {number: tiers_of(store, number) - {"device"} for number in range(8)}
        assert all("host" not in below[n] for n in (1, 3, 5, 7))
        assert {frozenset(below[n]) for n in (1, 3)} == {frozenset({"disk"})}
        assert below[0] == {"host"}
        for number in range(8):
            with store.read(key(number)) as lease:
                assert lease.tensor.tolist() == page(number, len(lease.tensor)).tolist()


def test_what_the_device_refuses_is_there_only_while_it_is_leased(tmp_path):
    with three_tiers(tmp_path, admission={"device": "second_hit"}) as store:
        store.put(key(1), page(1))
        assert tiers_of(store, 1) == {"host"}
        store.put(key(2), page(2))
        with store.read(key(1)):  # asked for a second time
            pass
        assert tiers_of(store, 1) == {"device", "host"}
    with three_tiers(tmp_path, admission={"device": "size"}, admission_limit={"device": 1}) as store:
        store.put(key(1), page(1))
        with store.read(key(1)), store.read(key(1)) as lease:
            assert lease.tensor[5] == 1
            assert tiers_of(store, 1) == {"device", "host"}
        assert tiers_of(store, 1) == {"host"}
        assert store.stats().bytes_used["device"] == 0


def test_no_page_is_lost_to_admission():
    """Where nothing below has room, a tier takes what it would have refused."""
    with open_store(
        device=4 * PAGE,
        host=3 * PAGE,
        staging=PAGE,
        policy="lru",
        admission="size",
        admission_limit={"device": 1, "host": 1},
    ) as store:
        for number in range(6):
            store.put(key(number), page(number))
        with pytest.raises(TierFullError):
            store.put(key(6), page(6))
        for number in range(2, 6):
            with store.read(key(number)):
                pass


def test_options_of_policies_and_admission_by_tier():
    config = StoreConfig(
        device="1MiB",
        host="2MiB",
        disk_capacity=None,
        policy={"device": "sieve", "host": "clock"},
        policy_params={"host": {"bits": 2}},
        admission={"host": "ghost"},
        admission_limit={"host": "1MiB"},
    )
    made = []

    def noted(name, **options):
        made.append((name, options))
        return create_policy(name, **options)

    TierStore(config, create_policy=noted).close()
    assert made == [("sieve", {"capacity_bytes": 1 << 20})]
    assert config.policy_of("host") == (
        "clock",
        {"bits": 2, "admission": "ghost", "admission_limit": 1 << 20},
    )
    for what in ("policy", "admission", "admission_limit", "policy_params"):
        with pytest.raises(ConfigError, match="tiers without a policy"):
            StoreConfig(**{what: {"tape": "lru"}})
        with pytest.raises(ConfigError, match="neither a name nor a table"):
            StoreConfig(**{what: 3})
    for options in ({"admission": "never"}, {"admission": "size"}, {"admission_limit": {"device": 3}}):
        with pytest.raises(PolicyError, match="admission"):
            open_store(device="1MiB", host="1MiB", **options)


def test_a_file_opens_a_store(tmp_path):
    path = tmp_path / "tuned.toml"
    path.write_text(
        'device = "1MiB"\nhost = "4MiB"\n[policy]\ndevice = "sieve"\n[admission]\ndevice = "ghost"\n'
    )
    with open_store(config=path, host="8MiB") as store:
        assert store.config.policy_of("device") == ("sieve", {"admission": "ghost"})
        assert store.config.host == "8MiB"
    path.write_text("color = 3\n")
    with pytest.raises(ConfigError, match="unknown options"):
        open_store(config=path)
