"""Policies inside the store: by name and tier, from the tuner's file, and the same victims as the simulator."""

import numpy as np
import pytest
import torch

from tiercache import PageKey, StoreConfig, TierStore, open_store
from tiercache.errors import ConfigError
from tiercache.policies import base, create_policy
from tiercache.policies.traces import read_trace

PAGE = 4096


def key(number):
    return PageKey(node=number.to_bytes(32, "little"), layer=0, kind="value")


OPS = {"insert": base.INSERT, "hit": base.HIT, "remove": base.REMOVE}
OPS |= {"lease": base.LEASE, "release": base.RELEASE, "evict": base.EVICT}


class Recorded:
    """A policy that notes what the store asks of it, as requests of a trace, and what it answered."""

    def __init__(self, policy):
        self.policy, self.requests, self.answers = policy, [], []

    def __getattr__(self, name):
        call = getattr(self.policy, name)
        if name not in OPS:
            return call

        def noted(page, number=-1, cost=1.0):
            self.requests.append((page, OPS[name], 0, 0, number, -1, cost))
            arguments = {"insert": (number, cost), "evict": (number,)}.get(name, ())
            return call(page, *arguments)

        return noted

    def set_next_use(self, page, when):
        self.requests.append((page, base.NEXT_USE, 0, 0, base.NEVER if when is None else when, -1, 0.0))
        self.policy.set_next_use(page, when)

    def victims(self, need, incoming=-1):
        self.requests.append((incoming, base.VICTIMS, 0, 0, need, -1, 0.0))
        self.answers.append(self.policy.victims(need, incoming))
        return self.answers[-1]


def page_numbers(count=400, pages=24):
    state = 1
    for _ in range(count):
        state = state * 1103515245 + 12345 & 0x7FFFFFFF
        yield (state >> 8) % pages if state & 64 else (state >> 8) % 5


@pytest.mark.parametrize("name", ["lru", "sieve", "planned"])
def test_what_a_store_did_replays_in_the_simulator_to_identical_victims(tmp_path, name):
    recorded: list[Recorded] = []

    def watched(name, *, capacity_bytes, **params):
        recorded.append(Recorded(create_policy(name, capacity_bytes=capacity_bytes, **params)))
        return recorded[-1]

    path = tmp_path / "run.parquet"
    config = StoreConfig(device=8 * PAGE, host=64 * PAGE, policy=name, trace=path)
    with TierStore(config, create_policy=watched) as store:
        for number in page_numbers():
            if not store.contains(key(number)):
                store.put(key(number), torch.full((PAGE,), number, dtype=torch.uint8))
            else:
                with store.read(key(number)):
                    pass
        requests, answers = list(recorded[0].requests), list(recorded[0].answers)
    assert sum(map(len, answers)) > 50
    trace = read_trace(path)
    assert trace.num_objects == 24
    assert (trace.requests["size"] == PAGE).all()
    replayed = create_policy(name, capacity_bytes=8 * PAGE)
    told = np.array(requests, base.REQUEST)
    events = np.empty(2048, base.REQUEST)
    again = []
    for i in range(len(told)):
        assert replayed.run(told, events, i, i + 1) == i + 1
        if told["op"][i] == base.VICTIMS:
            again.append(events["id"][: told["hit"][i]].tolist())
    assert again == answers


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
