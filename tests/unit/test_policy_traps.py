"""Each trap of eviction policies that a simulator can fall into, by name."""

import gzip
import lzma
import struct

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from tiercache.errors import PolicyError, TraceError
from tiercache.policies import base, create_policy
from tiercache.policies.simulate import Tier, run_tier, simulate
from tiercache.policies.traces import Trace, make_trace, read_trace, with_next_uses


def play(trace, policy, capacity, **options):
    return run_tier(trace, Tier(capacity_bytes=capacity, policy=policy), **options)


def residents(played):
    return set(played.policy.resident())


def test_forced_insert_and_bypass_differ_and_bypass_is_optimal():
    trace = with_next_uses(make_trace([0, 1, 2, 0, 1, 0, 1]))
    assert play(trace, "belady", 2).counts.hits == 3
    assert play(trace, "belady_bypass", 2).counts.hits == 4


def test_room_is_made_before_the_insert():
    """LRU never has more than its capacity, not even while a page enters."""
    trace = make_trace([0, 1, 2, 3], [40, 40, 40, 100])
    played = play(trace, "lru", 100)
    assert residents(played) == {3}
    assert played.counts.evictions == 3


def test_gdsf_ranks_the_missed_page_before_it_makes_room():
    """A missed page that is the least of all stays out, though others went before it."""
    trace = make_trace([0, 1, 0, 1, 2], [50, 50, 50, 50, 100])
    played = play(trace, "gdsf", 100)
    assert residents(played) == {0, 1}
    assert played.counts.refused == 1


def test_a_page_larger_than_the_tier_is_an_error_or_refused():
    trace = make_trace([0, 1], [10, 200])
    with pytest.raises(TraceError, match=r"record 1 is larger than tier cache.*200 bytes.*100 bytes"):
        play(trace, "lru", 100)
    assert play(trace, "lru", 100, oversize="refuse").counts.refused == 1


def test_a_grown_page_pushes_others_out_at_its_hit():
    trace = make_trace([0, 1, 1, 2], [50, 50, 80, 20], resize="each")
    played = play(trace, "lru", 100)
    assert played.hits.tolist() == [False, False, True, False]
    assert residents(played) == {1, 2}
    assert played.policy.used_bytes == 100


def test_a_page_that_grew_beyond_the_tier_leaves():
    trace = make_trace([0, 1, 1], [50, 50, 180], resize="each")
    assert residents(play(trace, "lru", 100, oversize="refuse")) == {0}


def test_ties_are_broken_by_age():
    for policy in ("lfu", "gdsf"):
        assert residents(play(make_trace([0, 1, 2, 3]), policy, 3)) == {1, 2, 3}


def test_a_warm_up_is_played_and_not_counted():
    trace = make_trace([0, 1, 0, 1])
    assert play(trace, "lru", 2, warmup=2).counts.misses == 0
    assert play(trace, "lru", 2).counts.misses == 2


def test_s3fifo_keeps_large_pages_unless_told_to_refuse_them():
    trace = make_trace([0, 0, 0], 20)
    assert play(trace, "s3fifo", 100).counts.hits == 2
    refusing = Tier(capacity_bytes=100, policy="s3fifo", params={"refuse_large": True})
    assert run_tier(trace, refusing).counts.hits == 0


def test_s3fifo_collapses_on_back_and_forth_scans():
    """Measured, so that nobody takes it for schedules: LRU keeps the turning ends, S3-FIFO next to nothing."""
    scan = [*range(100), *range(99, -1, -1)] * 6
    trace = with_next_uses(make_trace(scan))
    hits = {name: play(trace, name, 50).counts.hits for name in ("lru", "s3fifo", "belady_bypass")}
    assert hits["s3fifo"] < hits["lru"] <= hits["belady_bypass"]


def test_arcs_target_is_real_and_scales_by_size():
    """After ghost hits p is not a whole number of bytes."""
    rng = np.random.default_rng(3)
    keys = rng.zipf(1.3, 4000) % 300
    sizes = rng.integers(1, 30, 300)
    played = play(make_trace(keys, sizes[keys]), "arc", 800)
    target = played.policy.F[base.FLOATS]
    assert 0 < target <= 800
    assert target != int(target)


def test_gdsfs_l_never_falls():
    policy = create_policy("gdsf", capacity_bytes=100)
    for page, cost in enumerate([5.0, 1.0, 9.0]):
        policy.insert(page, 10, cost)
    policy.evict(2)
    high = policy.F[base.FLOATS]
    policy.evict(1)
    assert policy.F[base.FLOATS] == high > 0


def test_gdsfs_key_is_computed_anew_at_a_hit():
    """The hit raises page 0 above a page that entered later, with today's L."""
    policy = create_policy("gdsf", capacity_bytes=100)
    policy.insert(0, 10)
    policy.insert(1, 10)
    policy.hit(0)
    assert policy.victims(10) == [1]


def test_sieves_hand_moves_when_its_page_is_removed_from_outside():
    policy = create_policy("sieve", capacity_bytes=100)
    for page in range(4):
        policy.insert(page, 10)
    policy.hit(0)
    assert policy.victims(10) == [1]
    policy.remove(1)
    assert policy.victims(10) == [2]


def test_2q_does_not_promote_on_a_hit_in_a1in():
    policy = create_policy("2q", capacity_bytes=100)
    policy.insert(0, 10)
    policy.insert(1, 10)
    policy.hit(0)
    policy.hit(0)
    assert policy.victims(10) == [0]


def test_wtinylfus_sample_is_sized_by_entries_not_bytes():
    """Two traces that differ in the unit of size alone age alike."""
    keys = np.random.default_rng(5).zipf(1.2, 3000) % 200
    small = play(make_trace(keys, 1), "wtinylfu", 100)
    large = play(make_trace(keys, 1 << 20), "wtinylfu", 100 << 20)
    assert (small.hits == large.hits).all()


@pytest.mark.parametrize("policy", ["belady", "belady_bypass", "planned"])
def test_an_oracle_without_next_uses_is_an_error(policy):
    with pytest.raises(PolicyError, match="needs next uses"):
        play(make_trace([0, 1, 0]), policy, 1)


def test_next_uses_of_another_trace_are_an_error():
    trace = with_next_uses(make_trace([0, 1, 0, 1]))
    trace.requests["next_use"][0] = 1
    with pytest.raises(TraceError, match="record 0 tells is another page's"):
        play(trace, "belady", 1)


def test_a_key_that_becomes_more_evictable_than_stored_is_found():
    """A page that grows at its hit has a smaller key than the heap holds for it."""
    trace = make_trace([0, 1, 0, 2], [10, 10, 80, 20], resize="each")
    assert residents(play(trace, "gdsf", 100)) == {1, 2}


def test_heap_times_survive_their_32nd_bit():
    policy = create_policy("lfu", capacity_bytes=100)
    policy.insert(0, 10)
    policy.M[base.WORDS + 15] = (1 << 31) - 3
    for page in range(1, 6):
        policy.insert(page, 10)
    assert policy.victims(60) == [0, 1, 2, 3, 4, 5]


def test_belady_online_widens_its_ring_and_forgets_what_has_passed():
    policy = create_policy("belady", capacity_bytes=100, horizon=64)
    for page, when in enumerate([10, 5000, 70, None]):
        policy.insert(page, 10)
        policy.set_next_use(page, when)
    assert policy.victims(40) == [3, 1, 2, 0]
    policy.advance(11)
    assert policy.victims(20) == [3, 0]
    policy.advance(0)
    assert len(policy.victims(40)) == 4


def test_tiers_exclusive_and_inclusive():
    trace = make_trace([0, 1, 2, 0, 1, 2] * 5)
    tiers = [Tier(capacity_bytes=1, name="device"), Tier(capacity_bytes=2, name="host", latency_s=0.5)]
    exclusive = simulate(trace, tiers, source_latency_s=2.0)
    inclusive = simulate(trace, tiers, demotion="inclusive", source_latency_s=2.0)
    assert exclusive.counts[1].misses == 3  # three pages fit one above and two below
    assert inclusive.counts[1].misses == 30  # copies above take no room below: two of three in a loop
    assert exclusive.stall_s == 3 * 2.0 + 27 * 0.5
    assert exclusive.moved_down_bytes[0] == 29
    assert inclusive.stall_s == 60.0


@pytest.mark.parametrize(
    ("admission", "limit", "hits"),
    [("always", None, 4), ("second_hit", None, 2), ("size", 1, 0), ("ghost", 100, 2)],
)
def test_admissions(admission, limit, hits):
    tier = Tier(capacity_bytes=10, admission=admission, admission_limit=limit)
    assert run_tier(make_trace([0, 1, 0, 1, 0, 1], 2), tier).counts.hits == hits


def test_leases_hold_and_eviction_is_all_or_nothing():
    ops = [base.GET, base.GET, base.LEASE, base.GET]
    trace = make_trace([0, 1, 0, 2], [50, 50, 50, 80], ops=ops)
    played = play(trace, "lru", 100, atomic=True)
    assert residents(played) == {0, 1}
    assert played.counts.evictions == 0


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Tier(capacity_bytes=0), "capacity_bytes must be positive"),
        (lambda: make_trace([]), "the trace is empty"),
        (lambda: make_trace([1, 2], [3, -1]), "negative size in record 1"),
        (lambda: make_trace([1, 2, 1], [3, 4, 5]), "key 1 of record 0 changes its size"),
        (lambda: Tier(capacity_bytes=1, admission="size"), "needs admission_limit"),
        (lambda: Tier(capacity_bytes=1, admission_limit=3), "has no effect"),
        (lambda: create_policy("clock", capacity_bytes=1, bits=0), "bits"),
    ],
)
def test_wrong_values_are_named(make, message):
    with pytest.raises((PolicyError, TraceError), match=message):
        make()


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.trace", b"1\n*\nx\n", "line 3 is no integer"),
        ("a.lis", b"1 2 0 0\n5\n", "line 2 is no ARC request"),
        ("a.jsonl", b'{"timestamp": 1}\n', "line 1 is no Mooncake request"),
        ("a.csv", b"id,size\n1,2\n3,x\n", "line 3, column 'size' is no number"),
        ("a.csv", b"name,size\n1,2\n", "no column for id"),
        ("a.oracleGeneral.bin", b"\0" * 30, "truncated in record 1"),
        ("a.oracleGeneral.bin", b"", "the trace is empty"),
        ("a.trace.gz", b"\x1f\x8b\x08\0\0", "truncated or damaged"),
        ("a.trace.zst", b"\x28\xb5\x2f\xfd", "truncated or damaged"),
        ("a.trace.gz", gzip.compress(b"1\n2\n" * 99, mtime=0)[:-9], "truncated or damaged"),
        ("a.trace.gz", b"\x1f\x8b\x08" + b"\0" * 7 + b"\xff" * 30, "truncated or damaged"),
        ("a.trace.xz", lzma.compress(b"1\n2\n" * 99)[:-9], "truncated or damaged"),
        ("a.lis.zst", zstandard.compress(b"1 2 0 0\n" * 99)[:-3], "truncated or damaged"),
        ("a.oracleGeneral.bin.xz", lzma.compress(b"\0" * 50), "truncated in record 2"),
        ("a.csv.gz", gzip.compress(b"id,size\n1,2\n3", mtime=0), "line 3, column 'size' is no number"),
        ("a.csv", b"id,size\n1,2\n3,-4\n", "negative size in line 3"),
        ("a.csv", b"id,size\n1,2\n3,4\n1,5\n", "key 1 of line 2 changes its size"),
        ("a.csv", b"id,size\n1,99999999999999999999\n", "size is no column of 64-bit numbers"),
        ("a.csv", b"", "the trace is empty"),
        ("a.csv", b"id\n", "the trace is empty"),
        ("a.lis", b"1 -2 0 0\n", "line 1 has a negative length"),
        ("a.trace", b"1\n\xff\n", "line 2 is no text"),
        ("a.trace", b"1\n99999999999999999999\n", "keys are neither"),
        (
            "a.jsonl",
            b'{"timestamp": 1, "input_length": 9, "hash_ids": [1]}\n{"timest',
            "line 2 is no Mooncake",
        ),
        ("a.jsonl", b'{"timestamp": 1, "input_length": 9, "hash_ids": [1, 2]}', "line 1 has more blocks"),
        ("a.jsonl", b'{"timestamp": 1, "input_length": 9, "hash_ids": 5}', "line 1 is no Mooncake"),
        ("a.parquet", b"PAR1", "no Parquet file, or a truncated one"),
        ("a.xyz", b"", "unknown format"),
    ],
)
def test_wrong_files_are_named_with_line_or_record(tmp_path, name, content, message):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(TraceError, match=message):
        read_trace(path)


def test_an_unknown_column_is_named(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("obj,bytes\n1,2\n")
    with pytest.raises(TraceError, match="unknown column 'page'"):
        read_trace(path, columns={"id": "page"})
    assert isinstance(read_trace(path, columns={"id": "obj"}), Trace)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bytes": [1, None, 3]}, "record 1 has no bytes"),
        ({"key": [1, 2, None]}, "record 2 has no key"),
        ({"bytes": [1, -2, 3]}, "negative size in record 1"),
        ({"bytes": ["x", "y", "z"]}, "size is no column"),
        ({"op": ["read", "write", "read"]}, "record 1 has an unknown op; got write"),
        ({"op": None}, "unknown columns: no 'op'"),
        ({"key": [], "op": [], "bytes": []}, "the trace is empty"),
    ],
)
def test_a_wrong_parquet_names_the_record(tmp_path, change, message):
    path = tmp_path / "a.parquet"
    columns = {"key": [1, 2, 3], "op": ["read"] * 3, "bytes": [1, 2, 3], **change}
    pq.write_table(pa.table({name: values for name, values in columns.items() if values is not None}), path)
    with pytest.raises(TraceError, match=message):
        read_trace(path)
    whole = path.read_bytes()
    path.write_bytes(whole[:-12])
    with pytest.raises(TraceError, match="truncated"):
        read_trace(path)


@pytest.mark.parametrize(
    ("pack", "suffix"),
    [(gzip.compress, ".gz"), (lzma.compress, ".xz"), (zstandard.compress, ".zst"), (bytes, "")],
)
@pytest.mark.parametrize(
    ("name", "content", "keys"),
    [
        ("a.trace", b"5\n*\n7\n5\n", [5, 7, 5]),
        ("a.lis", b"5 2 0 0\n7 1 0 1\n", [5, 6, 7]),
        ("a.csv", b"time,obj_id,size\n0,5,9\n1,7,8\n", ["5", "7"]),
        ("a.jsonl", b'{"timestamp": 27, "input_length": 600, "hash_ids": [5, 7]}\n', [5, 7]),
        ("a.oracleGeneral.bin", struct.pack("<IQIqIQIq", 3, 5, 9, 2, 4, 5, 9, -1), [5, 5]),
    ],
)
def test_every_format_is_read_from_every_packing_also_in_parts(tmp_path, pack, suffix, name, content, keys):
    path = tmp_path / (name + suffix)
    half = len(content) // 2
    for data in (pack(content), pack(content[:half]) + pack(content[half:])):  # files that were appended to
        path.write_bytes(data)
        trace = read_trace(path)
        assert trace.keys[trace.requests["id"]].tolist() == keys


def test_a_folder_and_a_missing_file_are_no_traces(tmp_path):
    (tmp_path / "a.csv").mkdir()
    for name, message in (("a.csv", "cannot be read"), ("b.csv.gz", "no such trace")):
        with pytest.raises(TraceError, match=message):
            read_trace(tmp_path / name)
