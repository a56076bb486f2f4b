"""What the store relies on, for every policy by name."""

import subprocess
import sys

import pytest

from tiercache.errors import PolicyError
from tiercache.policies import POLICIES, create_policy


@pytest.fixture(params=POLICIES)
def policy(request):
    return create_policy(request.param, capacity_bytes=100, max_entries=8)


def fill(policy, sizes):
    for page, size in enumerate(sizes):
        policy.insert(page, size)


def test_victims_are_selected_and_not_evicted(policy):
    fill(policy, [30, 30, 40])
    picked = policy.victims(50)
    assert sum([30, 30, 40][page] for page in picked) >= 50
    assert len(set(picked)) == len(picked)
    assert policy.used_bytes == 100
    for page in picked:
        policy.evict(page, 1)
    assert sorted(policy.resident() + picked) == [0, 1, 2]


def test_leased_pages_are_never_victims(policy):
    fill(policy, [30, 30, 40])
    policy.lease(0)
    policy.lease(2)
    assert policy.victims(31) == []
    assert policy.victims(30) == [1]
    policy.release(2)
    assert sorted(policy.victims(70)) == [1, 2]


def test_a_removed_page_is_forgotten(policy):
    fill(policy, [30, 30, 40])
    policy.evict(1)
    for page in (0, 1, 2, 7):
        policy.remove(page)
    assert policy.resident() == []
    assert policy.used_bytes == 0
    assert policy.victims(1) == []


def test_ids_grow(policy):
    fill(policy, [1] * 50)
    policy.insert(5000, 3)
    assert len(policy.resident()) == 51
    assert len(policy.victims(53)) == 51


def test_misuse_is_named(policy):
    policy.insert(0, 10)
    with pytest.raises(PolicyError, match="page 1 is not in the tier"):
        policy.hit(1)
    with pytest.raises(PolicyError, match="released more often"):
        policy.release(0)
    policy.lease(0)
    with pytest.raises(PolicyError, match="page 0 is not in the tier, or is leased"):
        policy.evict(0)
    with pytest.raises(PolicyError, match="negative size"):
        policy.insert(3, -1)
    with pytest.raises(PolicyError, match="ids are dense"):
        policy.insert(-1, 1)


def test_unknown_names_and_parameters():
    with pytest.raises(PolicyError, match="unknown"):
        create_policy("nru", capacity_bytes=1)
    with pytest.raises(PolicyError, match="capacity_bytes"):
        create_policy("lru", capacity_bytes=0)
    with pytest.raises(PolicyError, match="color"):
        create_policy("lru", capacity_bytes=1, color=3)


def test_a_second_process_finds_the_compiled_code():
    create_policy("lru", capacity_bytes=100)
    program = (
        "from tiercache.policies import create_policy\n"
        "stats = create_policy('lru', capacity_bytes=100)._step.stats\n"
        "print(sum(stats.cache_hits.values()), sum(stats.cache_misses.values()))"
    )
    told = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert told.stdout.split() == ["1", "0"]


@pytest.mark.parametrize("name", POLICIES)
def test_many_victims_pass_over_many_leases(name):
    """Half of the pages are leased, the other half is chosen at once and in parts: nobody twice, nobody leased."""
    policy = create_policy(name, capacity_bytes=4000, max_entries=8)
    fill(policy, [10] * 400)
    for page in range(0, 400, 2):
        policy.lease(page)
    assert sorted(policy.victims(2000)) == list(range(1, 400, 2))
    gone = []
    while part := policy.victims(30):
        assert len(part) == 3
        gone += part
        for page in part:
            policy.evict(page, 1)
        if len(gone) >= 198:
            break
    assert len(set(gone)) == 198
    for page in range(0, 400, 2):
        policy.release(page)
    assert len(policy.victims(2020)) == 202


@pytest.mark.parametrize(
    ("admission", "limit", "answers"),
    [
        ("always", None, [True, True, True]),
        ("second_hit", None, [False, True, True]),
        ("second_hit", 3, [False, False, True]),
        ("size", 29, [False, False, False]),
        ("size", 30, [True, True, True]),
        ("ghost", None, [False, True, True]),
        ("ghost", 40, [False, False, False]),  # 90 bytes asked in between and now
        ("ghost", 90, [False, True, True]),
    ],
)
def test_admission_is_asked_before_a_page_enters(admission, limit, answers):
    """Page 0 of 30 bytes asks three times; others of 60 bytes ask in between."""
    policy = create_policy("lru", capacity_bytes=100, admission=admission, admission_limit=limit)
    found = []
    for other in range(1, 4):
        found.append(policy.admits(0, 30))
        policy.admits(other, 60)
    assert found == answers
    policy.remove(0)
    assert policy.admits(0, 30) == answers[0]


def test_a_store_asks_a_policy_that_judges():
    """s3fifo that was told to refuse; lirs and slru only judge what fits their queues in a trace."""
    refusing = create_policy("s3fifo", capacity_bytes=100, refuse_large=True)
    assert (refusing.admits(0, 5), refusing.admits(1, 50)) == (True, False)
    for name in ("lirs", "slru", "lru"):
        policy = create_policy(name, capacity_bytes=100)
        assert not policy.selective
        assert policy.admits(0, 99)
