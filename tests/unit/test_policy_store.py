"""Policies inside the store: by name and tier, from the tuner's file, and the same victims as the simulator."""

import pytest
import torch

from tiercache import PageKey, StoreConfig, TierStore, open_store
from tiercache.errors import ConfigError
from tiercache.policies import base, create_policy
from tiercache.policies.simulate import Tier, run_tier
from tiercache.policies.traces import read_trace

PAGE = 4096


def key(number):
    return PageKey(node=number.to_bytes(32, "little"), layer=0, kind="value")


class Watched:
    """A policy that notes whom it lost by eviction."""

    def __init__(self, policy, evicted):
        self.policy, self.evicted = policy, evicted

    def evict(self, page, to_tier=-1):
        self.evicted.append(page)
        self.policy.evict(page, to_tier)

    def __getattr__(self, name):
        return getattr(self.policy, name)


def page_numbers(count=400, pages=24):
    state = 1
    for _ in range(count):
        state = state * 1103515245 + 12345 & 0x7FFFFFFF
        yield (state >> 8) % pages if state & 64 else (state >> 8) % 5


@pytest.mark.parametrize("name", ["lru", "fifo", "lfu"])
def test_the_stores_trace_replays_to_identical_victims(tmp_path, name):
    """For policies whose choice changes nothing: a hand also moves when the store looks and evicts nobody."""
    evicted: list[int] = []

    def watched(name, *, capacity_bytes, **params):
        return Watched(create_policy(name, capacity_bytes=capacity_bytes, **params), evicted)

    path = tmp_path / "run.parquet"
    config = StoreConfig(device=8 * PAGE, host=64 * PAGE, policy=name, trace=path)
    names: dict[int, int] = {}
    with TierStore(config, create_policy=watched) as store:
        for number in page_numbers():
            if not store.contains(key(number)):
                store.put(key(number), torch.full((PAGE,), number, dtype=torch.uint8))
            else:
                with store.read(key(number)):
                    pass
            names.setdefault(number, len(names))
        victims = list(evicted)
    assert len(victims) > 50
    played = run_tier(
        read_trace(path), Tier(capacity_bytes=8 * PAGE, policy=name), emit="exclusive", atomic=True
    )
    gone = played.events[played.events["op"] == base.PUT]
    assert gone["id"].tolist() == victims


def test_policies_by_tier_and_their_parameters():
    config = StoreConfig(
        device="1MiB",
        host="2MiB",
        policy={"device": "sieve", "host": "clock"},
        policy_params={"host": {"bits": 2}},
    )
    made = []

    def noted(name, **options):
        made.append((name, options))
        return create_policy(name, **options)

    TierStore(config, create_policy=noted).close()
    assert made == [("sieve", {"capacity_bytes": 1 << 20})]
    assert config.policy_of("host") == ("clock", {"bits": 2})
    with pytest.raises(ConfigError, match="tiers without a policy"):
        StoreConfig(policy={"tape": "lru"})


def test_a_file_opens_a_store(tmp_path):
    path = tmp_path / "tuned.toml"
    path.write_text('device = "1MiB"\nhost = "4MiB"\n[policy]\ndevice = "sieve"\n')
    with open_store(config=path, host="8MiB") as store:
        assert store.config.policy_of("device") == ("sieve", {})
        assert store.config.host == "8MiB"
    path.write_text("color = 3\n")
    with pytest.raises(ConfigError, match="unknown options"):
        open_store(config=path)
