"""The access plan of a walk: every page that its visits will read and write, in order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from tiercache.entry import PageKey
from tiercache.plan import AccessPlan
from tiercache.runtime.frame import Frame, LayerSpec, page_calls, spent_ancestors
from tiercache.runtime.kinds import of_graph
from tiercache.runtime.probe import Event, Shape
from tiercache.runtime.schedule import Visit
from tiercache.runtime.selection import INDEX_KEY, SELECTION
from tiercache.runtime.states import is_state
from tiercache.runtime.step import Step, needs_graph, records_selection

ATTENTION_KINDS = ("attention_output", "attention_lse")  # pop computes them again where it doesn't find them
_FIRST_OF_BURST = ("key", "latent", INDEX_KEY)
_PHASES = {"capture": "capture", "score": "score", "replay": "replay", "pop": "pop"}


def plan_accesses(runner: Any, step: Step, visits: Sequence[Visit], shape: Shape) -> AccessPlan:
    """Expands what one visit of each kind was seen to ask of the store over the tree's own nodes and pages."""
    plan = AccessPlan()
    released: Counter[PageKey] = Counter()
    for visit in visits:
        _plan_visit(plan, runner, step, visit, shape, released)
        if visit.kind == "pop":
            _plan_discards(plan, step, visit.nodes[0], shape, released)
    return plan


def _plan_visit(
    plan: AccessPlan, runner: Any, step: Step, visit: Visit, shape: Shape, released: Counter[PageKey]
) -> None:
    frame: Frame = runner.frame(step, None, visit.nodes, _PHASES[visit.kind], visit.spent)
    constant = visit.kind in ("capture", "pop") and not needs_graph(step, visit.nodes[0])
    if constant and visit.kind == "pop":
        return  # its projection alone
    recorded = records_selection(step, visit.nodes[0])
    own = frame.pieces[0]
    kept = step.kept(visit.nodes[0])
    ungraphed = constant or kept == "recompute"
    for group in _groups(shape.of(visit.kind, kept)):
        event = group[0]
        if event.role == "ancestor" and is_state(event.kind):
            _plan_state(plan, frame, event)
        elif event.role == "ancestor":
            _plan_burst(plan, frame, shape, group)
            if group[-1].operation == "accumulate":  # a backward
                _plan_releases(plan, frame, shape.layers[group[0].layer], released)
        elif recorded if event.kind == SELECTION else not (ungraphed and _leaves(event)):
            graph = step.graph if of_graph(event.kind) else 0
            key = PageKey(own.digest, event.layer, event.kind, graph)
            again_s = _again_s(step, own.node) if event.kind in ATTENTION_KINDS else None
            plan.add(event.operation, key, event.bytes_of(own.end - own.begin), again_s)


def _leaves(event: Event) -> bool:
    """Whether a capture puts what belongs to its graph."""
    return event.operation == "put" and of_graph(event.kind)


def _again_s(step: Step, node: int) -> float | None:
    keeping = step.keeping.get(node)
    return None if keeping is None else keeping.again_s


def _groups(events: Sequence[Event]) -> Iterator[list[Event]]:
    """Own accesses and states one by one; accesses to one ancestor's two pages together."""
    group: list[Event] = []
    for event in events:
        opens = _alone(event) or (event.operation == "read" and event.kind in _FIRST_OF_BURST)
        if group and (opens or _alone(group[0])):
            yield group
            group = []
        group.append(event)
    if group:
        yield group


def _alone(event: Event) -> bool:
    return event.role == "own" or is_state(event.kind)


def _plan_state(plan: AccessPlan, frame: Frame, event: Event) -> None:
    """One layer's access to a state of the parent, the only ancestor whose states count."""
    if not frame.ancestors:
        return
    parent = frame.ancestors[-1]
    if event.operation != "accumulate" or parent.trainable:
        graph = frame.graph if of_graph(event.kind) else 0
        key = PageKey(parent.digest, event.layer, event.kind, graph)
        plan.add(event.operation, key, event.bytes_of(parent.length))


def _plan_burst(plan: AccessPlan, frame: Frame, shape: Shape, group: list[Event]) -> None:
    """One layer's accesses to its ancestors' pages, page by page."""
    window = None if group[0].kind == INDEX_KEY else shape.layers[group[0].layer].window
    for ancestor in frame.ancestors:
        for _ in page_calls(frame.pieces, ancestor, window, None):
            for event in group:
                if event.operation == "accumulate" and not ancestor.trainable:
                    continue
                graph = frame.graph if of_graph(event.kind) else 0
                key = PageKey(ancestor.digest, event.layer, event.kind, graph)
                plan.add(event.operation, key, event.bytes_of(ancestor.length))


def _plan_releases(plan: AccessPlan, frame: Frame, layer: LayerSpec, released: Counter[PageKey]) -> None:
    """What a layer's backward gives back of ancestors that nobody attends to afterwards."""
    for ancestor in spent_ancestors(frame, layer.window):
        for kind in layer.kinds:
            key = PageKey(ancestor.digest, layer.index, kind)
            plan.add("discard", key)
            released[key] += 1


def _plan_discards(plan: AccessPlan, step: Step, node: int, shape: Shape, released: Counter[PageKey]) -> None:
    """What is left of a node once it is popped."""
    for key in content_keys(step.digests[node], shape, recorded=records_selection(step, node)):
        if released[key]:
            released[key] -= 1
        else:
            plan.add("discard", key)


def content_keys(node: bytes, shape: Shape, *, recorded: bool) -> list[PageKey]:
    """The pages that a capture of this node writes, but for those that belong to one graph.

    `recorded`: with what its queries selected, where they do.
    """
    return [
        PageKey(node, event.layer, event.kind)
        for event in shape.events["capture"]
        if event.role == "own" and event.operation == "put" and not of_graph(event.kind)
        if recorded or event.kind != SELECTION
    ]


def node_bytes(shape: Shape, num_tokens: int) -> int:
    """Bytes of the pages that the capture of a node of so many tokens writes, those of its graph aside."""
    return sum(
        event.bytes_of(num_tokens)
        for event in shape.events["capture"]
        if event.operation == "put" and not of_graph(event.kind)
    )
