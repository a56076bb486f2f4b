"""A small step walked without bytes: what each kind of visit costs behind 0, 1, 2 ... captured nodes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from tiercache.profile import Profile
from tiercache.runtime.engine import Engine
from tiercache.runtime.memory import watching_releases
from tiercache.runtime.planning.counting import Work, WorkCounter
from tiercache.runtime.planning.ledger import Ledger, Traffic
from tiercache.runtime.report import StepReport
from tiercache.runtime.rows import TokenRow
from tiercache.runtime.schedule import plan_visits

Which = Callable[[str], bool]
# Of what could be reused, the C library's allocator gives so much again at once: 0.22 to 0.39 in five steps of a 135M
# model, the rest once the visit is over.
_REUSED = 0.3
_LONGEST = 1024  # tokens of a rehearsed visit: enough for products at full speed
_LONGEST_OF_STATES = 128  # where layers have states: they walk through chunks of 64 one by one


@dataclass(slots=True)
class Visited:
    """One visit.

    Attributes:
        work: of it.
        traffic: what it asked of the store.
        peak_bytes: most memory of tensors that the store does not hold, sums of gradients included.
    """

    work: Work
    traffic: Traffic
    peak_bytes: int


@dataclass(frozen=True, slots=True)
class Sizes:
    """Tokens of a full node, and of each tail of a full visit."""

    node_tokens: int
    tails: tuple[int, ...]

    @property
    def visit_tokens(self) -> int:
        """Of all tails of a visit."""
        return sum(self.tails)

    def shortened(self, *, has_states: bool) -> Sizes:
        """Sizes that a rehearsal can walk in seconds; costs of full ones follow from theirs."""
        longest = _LONGEST_OF_STATES if has_states else _LONGEST
        parts = -(-self.node_tokens // longest)
        tails: list[int] = []
        for tail in self.tails:
            if tails and sum(tails) + tail > longest:
                break
            tails.append(min(tail, longest))
        return Sizes(-(-self.node_tokens // parts), tuple(tails))

    def halved(self) -> Sizes:
        """Half as many tokens in a node and in a visit."""
        half = len(self.tails) // 2
        tails = self.tails[:half] if half else (-(-self.tails[0] // 2),)
        return Sizes(-(-self.node_tokens // 2), tails)


@dataclass(slots=True)
class Rehearsal:
    """Costs of visits.

    Attributes:
        sizes: that were rehearsed.
        full: that the job's visits have.
        visits: by kind, of a rehearsed visit behind 0, 1, 2 ... rehearsed nodes.
        sum_bytes: of the parameters' gradient sums.
        fixed: by kind, the part of a visit's work that comes once whatever its length: sums of weights' gradients.
        half: costs of visits half as long, if those were rehearsed too.
    """

    sizes: Sizes
    full: Sizes
    visits: dict[str, list[Visited]]
    sum_bytes: int
    fixed: dict[str, Work] = field(default_factory=dict)
    half: Rehearsal | None = field(default=None, repr=False)
    _moved: dict[tuple[Any, ...], list[float]] = field(default_factory=dict, repr=False)

    def at_full_size(self, full: Sizes) -> Rehearsal:
        """The same costs, read as those of larger visits."""
        return replace(self, full=full)

    def with_halves(self, half: Rehearsal) -> Rehearsal:
        """The same costs, with what is fixed of a visit told from what half as long a visit costs."""
        fixed = {}
        for kind, visited in self.visits.items():
            ratio = self._unit(kind) / half._unit(kind)
            rest = half.visits[kind][0].work.plus(visited[0].work, -1 / ratio)
            fixed[kind] = Work().plus(rest.at_least_once(), ratio / (ratio - 1))
        return replace(self, fixed=fixed, half=half)

    def work(self, kind: str, tokens_above: float, tokens: float) -> Work:
        """Of a visit of `tokens` behind `tokens_above`.

        A longer node costs what shorter ones in a row cost, but for what comes once a visit: sums of weights'
        gradients, and operators on each page above.
        """
        unit = self._unit(kind)
        parts = max(1.0, tokens / unit)
        beside = kind == "replay" and len(self.sizes.tails) > 1  # tails don't see one another
        above = tokens_above + (0.0 if beside else (parts - 1) / 2 * unit)
        seen = [visited.work for visited in self.visits[kind]]
        low, part = self._depth(above, seen)
        first, step = seen[low], seen[low + 1].plus(seen[low], -1.0)
        deep = Work().plus(step, part, part * self.sizes.node_tokens / self.full.node_tokens)
        whole = first.plus(deep)
        fixed = self.fixed.get(kind, Work()).plus(Work(num_ops=deep.num_ops, op_s=deep.op_s))
        return fixed.plus(whole.plus(fixed, -1.0), tokens / unit)

    def moved(self, kind: str, tokens_above: float, operation: str, which: Which) -> float:
        """Bytes that a rehearsed visit behind `tokens_above` has of an operation, on such kinds of pages."""
        key = (kind, operation, which)
        if key not in self._moved:
            self._moved[key] = [_sum(visited.traffic, operation, which) for visited in self.visits[kind]]
        seen = self._moved[key]
        low, part = self._depth(tokens_above, seen)
        return seen[low] + part * (seen[low + 1] - seen[low])

    def own(self, kind: str, tokens_above: float, tokens: float, operation: str, which: Which) -> float:
        """The same for a visit of `tokens`, of an operation on its own node's pages: what half as long a visit has
        tells what grows with a token from what does not, such as states.
        """
        moved, unit = self.moved(kind, tokens_above, operation, which), self._unit(kind)
        if self.half is None:
            return tokens / unit * moved
        grown = self.moved(kind, 0, operation, which) - self.half.moved(kind, 0, operation, which)
        return moved + grown * (tokens - unit) / (unit - self.half._unit(kind))  # noqa: SLF001 - its own kind

    def share(self, kind: str, tokens: float) -> float:
        """Tokens over those of a rehearsed visit."""
        return tokens / self._unit(kind)

    @property
    def visit_bytes(self) -> int:
        """Most memory of a full visit outside the store, sums of gradients aside."""
        most = 0.0
        for kind, seen in self.visits.items():
            full = self.full.visit_tokens if kind == "replay" else self.full.node_tokens
            peak = max(visited.peak_bytes for visited in seen) - self.sum_bytes
            most = max(most, peak * self.share(kind, full))
        return round(most)

    @property
    def reused_bytes(self) -> int:
        """What sums take of the memory that activations leave, in main memory and in a step with one replay: in that
        the ones come while the others go. In a second replay the sums are there from its beginning.
        """
        return round(_REUSED * min(self.visit_bytes, self.sum_bytes))

    def _unit(self, kind: str) -> int:
        return self.sizes.visit_tokens if kind == "replay" else self.sizes.node_tokens

    def _depth(self, tokens_above: float, seen: list[Any]) -> tuple[int, float]:
        """The rehearsed depth to count from and how many nodes more: beyond the last each costs what it cost."""
        depth = tokens_above / self.sizes.node_tokens
        low = min(int(depth), len(seen) - 2)
        return low, depth - low


def _sum(traffic: Traffic, operation: str, which: Which) -> float:
    return sum(
        num_bytes
        for (made, kind), num_bytes in traffic.num_bytes.items()
        if made == operation and which(kind)
    )


@dataclass(slots=True)
class _Meter(StepReport):
    """A report that measures the walk's visits one by one."""

    counter: Any = None
    ledger: Any = None
    visited: list[Visited] = field(default_factory=list)

    @contextmanager
    def timed(self, kind: str) -> Iterator[None]:
        """Measures one visit."""
        del kind
        self.counter.reset()
        self.ledger.reset()
        yield
        self.visited.append(Visited(self.counter.work, self.ledger.traffic, self.counter.peak_bytes))


def rehearse(engine: Engine, sizes: Sizes, profile: Profile, depth: int) -> Rehearsal:
    """Walks a chain of nodes with a visit of tails behind each, inside `without_bytes`.

    Args:
        engine: of the model, whose options cut rows at these sizes.
        sizes: of nodes and of tails.
        profile: that prices the work.
        depth: nodes of the chain.
    """
    rows = _rows(sizes, depth)
    step = engine.make_step(rows)
    visits = plan_visits(step.tree, max_visit_tokens=step.max_visit_tokens, passes="step")
    counter = WorkCounter(profile)
    ledger = Ledger(counter)
    meter = _Meter(counter=counter, ledger=ledger)
    running = engine.running(step.tree.longest_row, step.sums, step.autocast)
    with running, counter, watching_releases(counter.released):
        engine.walk(step, ledger, "step", meter, _no_loss)  # type: ignore[arg-type]
    found: dict[str, dict[int, Visited]] = defaultdict(dict)
    for visit, visited in zip(visits, meter.visited, strict=True):
        above = len(step.tree.path(visit.nodes[0])) - 1
        found[visit.kind][above] = visited
    sum_bytes = step.sums.num_bytes
    step.sums.clear()
    first = next(iter(found["replay"].values()))  # in it the sums came to be, as once a step
    first.work.fresh_s = max(0.0, first.work.fresh_s - sum_bytes * profile.fresh_s_per_byte)
    by_depth = {kind: [seen[d] for d in sorted(seen)] for kind, seen in found.items()}
    return Rehearsal(sizes, sizes, by_depth, sum_bytes)


def _rows(sizes: Sizes, depth: int) -> list[TokenRow]:
    """Rows that end behind 0, 1, ... `depth` nodes; tails differ in their first tokens, so nothing else is shared."""
    node_tokens = sizes.node_tokens
    prompt = np.zeros(depth * node_tokens, dtype=np.int64)
    rows, mark = [], 1
    for level in range(depth + 1):
        for tail in sizes.tails:
            own = np.full(tail, mark, np.int64)
            mark += 1
            tokens = np.concatenate([prompt[: level * node_tokens], own])
            scored = np.arange(max(1, level * node_tokens), len(tokens))
            rows.append(TokenRow(tokens, scored, np.arange(len(tokens))))
    return rows


def _no_loss(leaves: tuple[int, ...]) -> None:
    """The caller's loss takes no time worth counting; its gradients have no values here."""
    del leaves
