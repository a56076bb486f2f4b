"""Exact counts of public traces, for every policy that has them."""

import policy_goldens as golden
import pytest

from tiercache.policies.simulate import Tier, run_tier
from tiercache.policies.traces import make_trace, read_trace, with_next_uses


def misses(trace, policy, capacity):
    return run_tier(trace, Tier(capacity_bytes=capacity, policy=policy)).counts


@pytest.fixture(scope="module")
def cloud_physics(trace_data):
    return read_trace(trace_data / "cloudPhysicsIO.oracleGeneral.bin")


@pytest.fixture(scope="module")
def oltp(trace_data):
    return with_next_uses(read_trace(trace_data / "OLTP.lis.zst"))


@pytest.mark.data
@pytest.mark.parametrize("policy", golden.CLOUD_PHYSICS)
def test_cloud_physics(cloud_physics, policy):
    counts = [misses(cloud_physics, policy, capacity) for capacity in golden.CAPACITIES]
    wanted, wanted_bytes = golden.CLOUD_PHYSICS[policy]
    assert [c.misses for c in counts] == wanted
    if wanted_bytes is not None:
        assert [c.miss_bytes for c in counts] == wanted_bytes
    assert {(c.hits + c.misses, c.hit_bytes + c.miss_bytes) for c in counts} == {(113872, 4368040448)}


@pytest.mark.data
@pytest.mark.parametrize("policy", golden.OLTP)
def test_oltp(oltp, policy):
    assert len(oltp) == 914145
    assert oltp.num_objects == 186880
    counts = [misses(oltp, policy, capacity) for capacity in golden.OLTP_CAPACITIES]
    assert [round(100 * c.hits / len(oltp), 2) for c in counts] == golden.OLTP[policy]


@pytest.mark.data
def test_lirs_multi1_with_bypass(trace_data):
    trace = with_next_uses(read_trace(trace_data / "lirs" / "multi1.trace.gz"))
    counts = misses(trace, "belady_bypass", 500)
    assert (counts.hits, len(trace)) == (9323, 15858)


@pytest.mark.data
@pytest.mark.parametrize("policy", golden.MOONCAKE)
def test_mooncake(trace_data, policy):
    trace, tokens, late = golden.mooncake_blocks(trace_data, policy)
    for capacity, wanted in zip(golden.MOONCAKE_BLOCKS, golden.MOONCAKE[policy], strict=True):
        hits = run_tier(trace, Tier(capacity_bytes=capacity, policy=policy)).hits
        assert tokens[hits & late].sum() == wanted


@pytest.mark.parametrize(("policy", "hits"), [("belady_bypass", 905), ("belady", 871)])
def test_java_random(policy, hits):
    trace = with_next_uses(make_trace(golden.java_random(42, 50, 2000)))
    assert misses(trace, policy, 8).hits == hits
