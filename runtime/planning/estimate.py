"""What one way of running a job takes: memory of each tier, traffic, and time by phase."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace

from tiercache.profile import Profile
from tiercache.runtime.kinds import is_attended_to, of_graph
from tiercache.runtime.planning.counting import Work
from tiercache.runtime.planning.rehearsal import Rehearsal, Which
from tiercache.runtime.probe import Shape
from tiercache.runtime.schedule import Visit
from tiercache.runtime.tree import Tree

PHASES = ("capture", "replay", "pop")
_RESIDENT_SHARE = (
    0.5  # of the device budget, for pages that visits come back to; the rest is what is on its way
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Budgets:
    """Bytes of each tier that one rank's store may use."""

    device: int
    host: int
    disk: int


@dataclass(slots=True)
class Phase:
    """One kind of visit, all of them together.

    Attributes:
        work: arithmetic.
        bytes_moved: by direction, as in "device->host".
        transfer_s: of the slower of the links, with nothing else running.
        seconds: of the phase, copies beside compute.
        tokens: that were run.
    """

    work: Work = field(default_factory=Work)
    bytes_moved: dict[str, float] = field(default_factory=dict)
    transfer_s: float = 0.0
    seconds: float = 0.0
    tokens: int = 0

    @property
    def bound(self) -> str:
        """What the phase would be faster with more of."""
        if self.transfer_s > self.work.seconds:
            slowest = max(self.bytes_moved, key=self.bytes_moved.__getitem__, default="")
            return "disk" if "disk" in slowest else "link"
        parts = {f.name: getattr(self.work, f.name) for f in fields(Work) if f.name.endswith("_s")}
        names = {
            "matmul_s": "matrix products",
            "attention_s": "attention",
            "elementwise_s": "memory",
            "op_s": "launches",
            "fresh_s": "memory",
        }
        return names[max(parts, key=parts.__getitem__)]


@dataclass(slots=True)
class Estimate:
    """A whole step.

    Attributes:
        phases: by kind of visit.
        page_bytes: most bytes of pages alive at once, whatever the tier.
        page_parts: of them "pages", "gradient pages", and what is "kept" for pop.
        tier_bytes: of them in each tier.
        visit_bytes: most memory of a visit outside the store, sums of gradients aside.
        num_visits: in all.
    """

    phases: dict[str, Phase]
    page_bytes: float
    page_parts: dict[str, float]
    tier_bytes: dict[str, float]
    visit_bytes: int
    num_visits: int

    @property
    def seconds(self) -> float:
        """Of the step."""
        return sum(phase.seconds for phase in self.phases.values())


@dataclass(slots=True)
class _Alive:
    """Bytes of pages alive, by what becomes of them."""

    pages: float = 0.0
    sums: float = 0.0
    kept: float = 0.0  # what pop takes back: layer inputs and their like

    @property
    def total(self) -> float:
        return self.pages + self.sums + self.kept


def estimate_step(
    tree: Tree, visits: list[Visit], rehearsal: Rehearsal, shape: Shape, budgets: Budgets, profile: Profile
) -> Estimate:
    """Adds up a step visit by visit.

    Pages beyond the device budget go down once and come up at every visit that reads them, but for the share that the
    plan keeps on the device: half of the budget. Sums are added to where they lie. What does not fit the host either
    lies on disk, that which is used last first.
    """
    alive, peak = _Alive(), _Alive()
    released: set[int] = set()
    had_bytes = 0.0  # of the device budget, in memory that the process has
    phases = {kind: Phase() for kind in PHASES}
    for visit in visits:
        tokens = sum(len(tree.nodes[n].tokens) for n in visit.nodes)
        at = _Visit(rehearsal, visit.kind, tree.nodes[visit.nodes[0]].start, tokens)
        phase = phases[visit.kind]
        flows = _flows(at, alive, budgets)
        had_sums = alive.sums
        _release(alive, tree, visit, rehearsal, released)
        _settle(alive, at)
        most = alive
        if alive.sums > had_sums and visit.spent:
            length = max(len(tree.nodes[node].tokens) for node in visit.spent)
            most = replace(alive, pages=alive.pages + _beyond_end(shape, length))
        if most.total > peak.total:
            peak = replace(most)
        held_bytes = max(had_bytes, min(alive.total, budgets.device))
        grown = Work(fresh_s=(held_bytes - had_bytes) * profile.fresh_s_per_byte)
        had_bytes = held_bytes
        if visit.kind == "replay" and not phase.tokens:
            grown = grown.plus(Work(fresh_s=rehearsal.sum_bytes * profile.fresh_s_per_byte))
        _add(phase, rehearsal.work(visit.kind, at.above, tokens).plus(grown), flows, profile)
        phase.tokens += tokens
    return Estimate(
        phases=phases,
        page_bytes=peak.total,
        page_parts={"pages": peak.pages, "gradient pages": peak.sums, "kept": peak.kept},
        tier_bytes=_tiers(peak.total, budgets),
        visit_bytes=rehearsal.visit_bytes,
        num_visits=len(visits),
    )


def _any(kind: str) -> bool:
    del kind
    return True


def _is_page(kind: str) -> bool:
    """Of a node's content: keys, values, states."""
    return not of_graph(kind)


def _is_sum(kind: str) -> bool:
    """What descendants send back into a page."""
    return kind.startswith("grad_")


@dataclass(frozen=True, slots=True)
class _Visit:
    """One visit of the job against the rehearsed ones."""

    rehearsal: Rehearsal
    kind: str
    above: int
    tokens: int

    def ancestors(self, operation: str, which: Which) -> float:
        """Bytes on pages of the nodes above."""
        return self.rehearsal.moved(self.kind, self.above, operation, which)

    def own(self, operation: str, which: Which, visited: str | None = None) -> float:
        """Bytes on the node's own pages, at a visit of another kind if that is told."""
        return self.rehearsal.own(visited or self.kind, self.above, self.tokens, operation, which)


def _tiers(total: float, budgets: Budgets) -> dict[str, float]:
    device = min(total, budgets.device)
    host = min(total - device, budgets.host)
    return {"device": device, "host": host, "disk": total - device - host}


def _flows(at: _Visit, alive: _Alive, budgets: Budgets) -> dict[str, float]:
    """Bytes that the visit moves, by direction."""
    put, taken = at.own("put", _any), at.own("take", _is_sum)
    kept = at.own("take", _any) - taken
    read, summed = at.ancestors("read", _is_page), at.ancestors("accumulate", _is_sum)
    total = max(1.0, alive.total + put)
    below = max(0.0, total - budgets.device)
    if not below:
        return {}
    away = max(0.0, 1.0 - _RESIDENT_SHARE * budgets.device / alive.pages) if alive.pages else 0.0
    low = below / total
    flows = {"device->host": put + low * summed, "host->device": away * read + low * (kept + taken)}
    on_disk = max(0.0, below - budgets.host)
    if on_disk:
        kept_there = min(1.0, on_disk / alive.kept) if alive.kept else 1.0
        rest_there = max(0.0, on_disk - alive.kept) / below
        flows["host->disk"] = on_disk / below * put
        flows["disk->host"] = kept_there * low * kept + rest_there * (away * read + low * (taken + summed))
    return flows


def _settle(alive: _Alive, at: _Visit) -> None:
    """What the visit leaves in the store."""
    if at.kind == "capture":
        pages = at.own("put", _is_page)
        alive.pages += pages
        alive.kept += at.own("put", _any) - pages
    elif at.kind == "replay":
        alive.sums = max(alive.sums, at.ancestors("accumulate", _is_sum))
    else:
        taken = at.own("take", _is_sum)
        # a window's pages further up may get their first gradient from this pop
        alive.sums = max(0.0, alive.sums - taken, at.ancestors("accumulate", _is_sum))
        alive.kept = max(0.0, alive.kept - (at.own("take", _any) - taken))
        alive.pages = max(0.0, alive.pages - at.own("put", _is_page, "capture"))


def _beyond_end(shape: Shape, num_tokens: int) -> int:
    """By how much a replay that makes all sums and spends its parent's keys and values holds more than at its end.

    Layer by layer, from the last to the first: its sums come, then its keys and values go.
    """
    held = most = going = 0
    at: int | None = None  # the layer whose keys and values are going
    for event in shape.events["replay"]:
        kind = event.kind.removeprefix("grad_")
        is_attended = event.operation == "accumulate" and is_attended_to(kind)
        if going and not (is_attended and event.layer == at):
            held, going = held - going, 0
        if event.operation == "accumulate":
            held += event.bytes_of(num_tokens)
            most = max(most, held)
        if is_attended:
            at, going = event.layer, going + _page_bytes(shape, event.layer, kind, num_tokens)
    return most - (held - going)


def _page_bytes(shape: Shape, layer: int, kind: str, num_tokens: int) -> int:
    return next(
        e.bytes_of(num_tokens)
        for e in shape.events["replay"]
        if (e.operation, e.layer, e.kind) == ("read", layer, kind)
    )


def _release(alive: _Alive, tree: Tree, visit: Visit, rehearsal: Rehearsal, released: set[int]) -> None:
    """Keys and values of nodes above for which this visit is the last go in its backward, not at their own pop."""
    for index in {*visit.spent, *(released & set(visit.nodes) if visit.kind == "pop" else ())}:
        node = tree.nodes[index]
        num_bytes = _Visit(rehearsal, "capture", node.start, len(node.tokens)).own("put", is_attended_to)
        if index in visit.spent:
            released.add(index)
            alive.pages = max(0.0, alive.pages - num_bytes)
        else:
            alive.pages += num_bytes  # which `_settle` takes off with all the rest


def _add(phase: Phase, work: Work, flows: dict[str, float], profile: Profile) -> None:
    """Prices a visit: copies run beside compute, which they slow down, and whatever outlasts it is waited for."""
    phase.work = phase.work.plus(work)
    transfer_s, slowed_s = 0.0, 0.0
    for tier, down, up in (("host", "device->host", "host->device"), ("disk", "host->disk", "disk->host")):
        moved_down, moved_up = flows.get(down, 0.0), flows.get(up, 0.0)
        if moved_down + moved_up > 0:
            speed = profile.tier(tier)
            seconds = speed.write_s(moved_down, 0) + speed.read_s(moved_up, 0)
            transfer_s = max(transfer_s, seconds)
            slowed_s += (1.0 - speed.compute_share) * seconds / speed.beside_compute
    for direction, num_bytes in flows.items():
        phase.bytes_moved[direction] = phase.bytes_moved.get(direction, 0.0) + num_bytes
    phase.transfer_s += transfer_s
    phase.seconds += max(work.seconds + slowed_s, transfer_s)
