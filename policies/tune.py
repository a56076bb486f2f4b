"""Searches policies, their parameters and admission for every tier of a trace.

Notes. A grid with successive halving: every candidate plays a small spatial sample of the trace against a
scaled-down tier, the better third, now with every admission, plays a larger sample, the best few the whole. Tiers
are tuned from the top down (what a tier does never depends on those below it), the score is the stall of all tiers
together. The lowest of several tiers keeps its default: a store gives up nothing there. The first part of the trace
decides; the held-out rest, played by warm tiers, says what that is worth. Pages stay where they are when they are read
into a higher tier (inclusive), as in a store. Rejected: a Bayesian search: the grid has tens of points, and its
answer can be read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from tiercache.policies.curves import sample_ids
from tiercache.policies.errors import TraceError
from tiercache.policies.profiles import Speed
from tiercache.policies.simulate import Result, simulate
from tiercache.policies.spec import Admission, Tier
from tiercache.policies.traces.base import Trace, with_next_uses

GRID: dict[str, list[dict[str, Any]]] = {
    "fifo": [{}],
    "lru": [{}],
    "clock": [{}, {"bits": 2}],
    "sieve": [{}],
    "lfu": [{}],
    "slru": [{"segments": 2}, {"segments": 4}],
    "2q": [{}, {"in_share": 0.1}, {"in_share": 0.5}],
    "arc": [{}],
    "s3fifo": [{}, {"small_share": 0.25}],
    "lirs": [{"hir_share": 0.02}, {"hir_share": 0.1}],
    "gdsf": [{}],
    "wtinylfu": [{}, {"window_share": 0.2}],
}
"""Candidates that need no future."""
ORACLES: dict[str, list[dict[str, Any]]] = {"planned": [{}], "belady": [{}]}
"""Candidates where the run follows a plan."""
SIZE_QUANTILES = (0.5, 0.9)
"""Of the sizes of pages: limits that admission by size is tried with."""
MIN_SAMPLE_PAGES = 2000


@dataclass(frozen=True, slots=True)
class Choice:
    """A tier's candidate."""

    policy: str
    params: Mapping[str, Any] = field(default_factory=dict)
    admission: Admission = "always"
    admission_limit: int | None = None

    def apply(self, tier: Tier) -> Tier:
        """The tier with this choice."""
        return replace(
            tier,
            policy=self.policy,
            params=dict(self.params),
            admission=self.admission,
            admission_limit=self.admission_limit,
        )

    def __str__(self) -> str:
        params = ", ".join(f"{name}={value}" for name, value in self.params.items())
        limit = "" if self.admission_limit is None else f" <= {self.admission_limit}"
        return (
            self.policy
            + (f"({params})" if params else "")
            + (f" + {self.admission}{limit}" * (self.admission != "always"))
        )


@dataclass(frozen=True, slots=True)
class Tuned:
    """What the search found.

    Attributes:
        tiers: with the chosen policies; those of `table` were searched.
        default: the same tiers as they would be without tuning.
        train: stall of the default and of the choice, in seconds, on the part that decided.
        held_out: the same on the rest, which the search never saw.
        table: by tier: candidates of the last round and their stall, best first.
    """

    tiers: tuple[Tier, ...]
    default: tuple[Tier, ...]
    train: tuple[float, float]
    held_out: tuple[float, float]
    table: dict[str, list[tuple[Choice, float]]]

    @property
    def gain_s(self) -> float:
        """Stall seconds saved on the held-out part."""
        return self.held_out[0] - self.held_out[1]


def make_tiers(capacities: Mapping[str, int], speeds: Mapping[str, Speed], policy: str) -> tuple[Tier, ...]:
    """Tiers from the top down with one policy."""
    return tuple(
        Tier(
            name=name,
            capacity_bytes=capacity,
            policy=policy,
            latency_s=speeds[name].latency_s,
            bytes_per_s=speeds[name].bytes_per_s,
        )
        for name, capacity in capacities.items()
        if capacity > 0
    )


def tune(
    trace: Trace,
    capacities: Mapping[str, int],
    speeds: Mapping[str, Speed],
    *,
    known_future: bool = False,
    held_out: float = 0.3,
    rounds: Sequence[float] = (0.05, 0.25, 1.0),
    seed: int = 0,
    progress: Callable[[str], None] | None = None,
) -> Tuned:
    """Chooses policy, parameters and admission of each tier.

    Args:
        trace: recorded accesses.
        capacities: bytes by tier, from the top down.
        speeds: by tier, and "source" for what no tier holds.
        known_future: whether runs follow a plan, so that oracle policies and the default `planned` can be used.
        held_out: last share of the trace, which only judges.
        rounds: rates of the samples of each round; a round keeps a third.
        seed: of the samples.
        progress: called with a line about each round.

    Raises:
        TraceError: the trace is too short to be split.
    """
    if not 0 < held_out < 1 or len(trace) * min(held_out, 1 - held_out) < 1:
        raise TraceError("tune: held_out leaves nothing on one side", got=held_out, limit="0 to 1")
    whole = with_next_uses(trace) if known_future else trace
    cut = round(len(trace) * (1 - held_out))
    train = whole.part(0, cut)
    default = make_tiers(capacities, speeds, "planned" if known_future else "lru")
    chosen = list(default)
    table: dict[str, list[tuple[Choice, float]]] = {}
    admissions = _admissions(train)
    for level, tier in enumerate(default[:-1] or default):
        candidates = _grid(known_future)
        for number, rate in enumerate(rounds):
            part = _sample(train, rate, seed)
            scored = []
            for choice in candidates:
                trial = [*chosen[:level], choice.apply(tier), *chosen[level + 1 :]]
                scored.append((choice, _stall(part[0], trial, speeds, part[1])))
            scored.sort(key=lambda pair: pair[1])
            table[tier.name] = scored
            if progress is not None:
                progress(f"{tier.name}, round {number + 1}: {len(scored)} candidates, best {scored[0][0]}")
            candidates = [choice for choice, _ in scored[: max(3, len(scored) // 3)]]
            if number == 0:
                candidates = [replace(choice, **told) for choice in candidates for told in admissions]
        chosen[level] = table[tier.name][0][0].apply(tier)
    trained = tuple(_stall(train, tiers, speeds, 1.0) for tiers in (default, chosen))
    judged = tuple(play(whole, tiers, speeds, warmup=cut).stall_s for tiers in (default, chosen))
    return Tuned(tuple(chosen), default, (trained[0], trained[1]), (judged[0], judged[1]), table)


def _grid(known_future: bool) -> list[Choice]:
    grid = {**GRID, **(ORACLES if known_future else {})}
    return [Choice(policy, params) for policy, variants in grid.items() for params in variants]


def _admissions(trace: Trace) -> list[dict[str, Any]]:
    """Fields of `Choice` for each admission that can matter: by size only where sizes differ."""
    sizes = np.unique(trace.requests["size"])
    limits = sorted(
        {int(np.quantile(trace.requests["size"], q)) for q in SIZE_QUANTILES} - {int(sizes[-1]), 0}
    )
    by_size: list[dict[str, Any]] = [{"admission": "size", "admission_limit": limit} for limit in limits]
    return [{}, {"admission": "second_hit"}, {"admission": "ghost"}, *by_size]


def _sample(trace: Trace, rate: float, seed: int) -> tuple[Trace, float]:
    """The sample and its true rate: never fewer pages than a curve needs."""
    rate = min(1.0, max(rate, MIN_SAMPLE_PAGES / max(trace.num_objects, 1)))
    if rate >= 1:
        return trace, 1.0
    return trace.select(sample_ids(trace, rate, seed)), rate


def _stall(trace: Trace, tiers: Sequence[Tier], speeds: Mapping[str, Speed], rate: float) -> float:
    scaled = [replace(tier, capacity_bytes=max(1, round(tier.capacity_bytes * rate))) for tier in tiers]
    return play(trace, scaled, speeds).stall_s / rate


def play(trace: Trace, tiers: Sequence[Tier], speeds: Mapping[str, Speed], warmup: int = 0) -> Result:
    """A simulation with the source's speed from `speeds`."""
    source = speeds["source"]
    return simulate(
        trace,
        tiers,
        demotion="inclusive",
        source_latency_s=source.latency_s,
        source_bytes_per_s=source.bytes_per_s,
        warmup=warmup,
        oversize="refuse",
    )


def write_config(tuned: Tuned, extra: Mapping[str, Any], comment: str) -> str:
    """The TOML that `open_store(config=FILE)` takes: budgets, and policy, parameters and admission by tier.

    The lowest of several tiers is left out: a store evicts nothing there.
    """
    lines = [f"# {line}" for line in comment.splitlines()]
    lines += [f"{name} = {_toml(value)}" for name, value in extra.items()]
    governed = tuned.tiers[:-1] or tuned.tiers
    tables: dict[str, Mapping[str, Any]] = {
        "policy": {tier.name: tier.policy for tier in governed},
        **{f"policy_params.{tier.name}": tier.params for tier in governed},
        "admission": {tier.name: tier.admission for tier in governed if tier.admission != "always"},
        "admission_limit": {t.name: t.admission_limit for t in governed if t.admission_limit is not None},
    }
    for name, table in tables.items():
        if table:
            lines += ["", f"[{name}]", *(f"{key} = {_toml(value)}" for key, value in table.items())]
    return "\n".join(lines) + "\n"


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return f'"{value}"' if isinstance(value, str) else repr(value)
