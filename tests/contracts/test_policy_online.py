"""What the store relies on, for every policy by name."""

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
