"""What one visit of each kind asks of the store, learned by running a tree of a few tokens against a recorder."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.flop_counter import FlopCounterMode

from tiercache.entry import PageKey
from tiercache.plan import Operation
from tiercache.runtime.balance import Balance
from tiercache.runtime.frame import LayerSpec
from tiercache.runtime.kernels import accumulator_dtype
from tiercache.runtime.kinds import is_content, of_graph
from tiercache.runtime.options import KEPT_ACTIVATIONS, KeptActivations, PrefixActivations
from tiercache.runtime.params import ParameterSums
from tiercache.runtime.schedule import VisitKind
from tiercache.runtime.states import is_state
from tiercache.runtime.step import Keeping, Step, make_step
from tiercache.runtime.terms import NodeTerms, Terms
from tiercache.runtime.tree import Node, Tree

_TOKENS = 2  # of each node of the probe but one
_LONGER = 4  # of that one: what two lengths leave tells what grows with a token
_TOKENS_OF_STATES = (
    256  # of the replayed tail where layers have states: they work in chunks of so many tokens
)


@dataclass(frozen=True, slots=True)
class Event:
    """One access of a visit.

    Attributes:
        operation: of the store.
        role: "own" for pages of the node that is visited, "ancestor" for those it attends to.
        layer: field of the page's key.
        kind: field of the page's key.
        num_bytes: of the page: of one token, or the whole of a state, whose size does not depend on length.
        fixed_bytes: of the page, whatever its length: what layers share of a graph, such as a cast of a weight.
    """

    operation: Operation
    role: Literal["own", "ancestor"]
    layer: int
    kind: str
    num_bytes: int
    fixed_bytes: int = 0

    def bytes_of(self, num_tokens: int) -> int:
        """Size of the page of a node of so many tokens."""
        return self.fixed_bytes + self.num_bytes * (1 if is_state(self.kind) else num_tokens)


@dataclass(frozen=True, slots=True)
class Shape:
    """A model as the store sees it.

    Attributes:
        layers: attention layers in the order of their calls.
        events: accesses of each kind of visit against one ancestor's page.
        others: those of captures and pops that leave something else behind, where more than one was probed.
        flops_per_token: of a forward, attention over pages aside; 0 where only one was.
        activation_bytes_per_token: what autograd keeps of one token of a tail, all layers together.
    """

    layers: tuple[LayerSpec, ...]
    events: dict[VisitKind, tuple[Event, ...]]
    activation_bytes_per_token: int
    others: dict[tuple[VisitKind, KeptActivations], tuple[Event, ...]] = field(default_factory=dict)
    flops_per_token: float = 0.0

    def of(self, kind: VisitKind, kept: KeptActivations) -> tuple[Event, ...]:
        """Accesses of a visit of a node whose capture leaves `kept`."""
        return self.others.get((kind, kept), self.events[kind])

    @property
    def page_bytes_per_token(self) -> int:
        """Of the largest page of one layer, whose size depends on length; 0 without attention layers."""
        return max(self._content_bytes(), default=0)

    @property
    def gradient_bytes_per_token(self) -> int:
        """Of the largest gradient page of one layer; 0 without attention layers."""
        return max(
            (width * accumulator_dtype(layer.dtype).itemsize for layer, width in self._widths()), default=0
        )

    @property
    def prefix_bytes_per_token(self) -> int:
        """Of all layers' pages together; states, whose size does not depend on length, aside."""
        return sum(self._content_bytes())

    @property
    def expanded_bytes_per_token(self) -> int:
        """What those pages would be if every layer's held keys and values."""
        sizes = ((layer.dtype.itemsize, (layer.key_page, layer.value_page)) for layer in self.layers)
        return sum(size * heads * width for size, pages in sizes for heads, width in pages)

    @property
    def state_bytes(self) -> int:
        """Of all layers' states at the end of one node."""
        return sum(e.num_bytes for e in self._own_puts() if is_state(e.kind))

    def _content_bytes(self) -> list[int]:
        """Of a token, in each page of a node."""
        return [e.num_bytes for e in self._own_puts() if is_content(e.kind)]

    def _own_puts(self) -> list[Event]:
        return [e for e in self.events["capture"] if e.operation == "put" and e.role == "own"]

    def _widths(self) -> Iterator[tuple[LayerSpec, int]]:
        """Numbers of a token in each layer's two pages."""
        for layer in self.layers:
            for heads, width in layer.stored_pages:
                yield layer, heads * width


class _Recorder:
    """A store in a dict that notes what it is asked."""

    tensor_types = (FakeTensor,)  # a plan probes a model without bytes

    def __init__(self) -> None:
        self.pages: dict[PageKey, torch.Tensor] = {}
        self.accesses: list[tuple[Operation, PageKey, int]] = []

    def _note(self, operation: Operation, key: PageKey, tensor: torch.Tensor | None) -> None:
        size = 0 if tensor is None else tensor.numel() * tensor.element_size()
        self.accesses.append((operation, key, size))

    def put(self, key: PageKey, tensor: torch.Tensor, *, own: bool = False) -> bool:
        del own
        self.pages[key] = tensor.detach().clone()
        self._note("put", key, tensor)
        return True

    def read(self, key: PageKey) -> Any:
        self._note("read", key, self.pages[key])
        return nullcontext(_Lease(self.pages[key]))

    def accumulate(self, key: PageKey, tensor: torch.Tensor) -> None:
        total = tensor.detach().to(accumulator_dtype(tensor.dtype), copy=True)
        self.pages[key] = self.pages[key] + total if key in self.pages else total
        self._note("accumulate", key, total)

    def take(self, key: PageKey) -> torch.Tensor | None:
        taken = self.pages.pop(key, None)
        self._note("take", key, taken)
        return taken

    def release(self, key: PageKey) -> None:
        raise AssertionError(f"the probe spends no page: {key}")


@dataclass(frozen=True, slots=True)
class _Lease:
    tensor: torch.Tensor


class _KeptBytes:
    """Counts each storage that a graph keeps, weights aside, once."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self._kept: dict[int, torch.UntypedStorage] = {}

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        key = storage._cdata  # noqa: SLF001 - the storage itself: without bytes all have the same address
        is_weight = tensor.is_leaf or (tensor._base is not None and tensor._base.is_leaf)  # noqa: SLF001
        if not is_weight and key not in self._kept:
            self._kept[key] = storage
            self.num_bytes += storage.nbytes()
        return tensor


def probe_tree(tail_tokens: int) -> Tree:
    """A root, a child to be captured with a leaf of its own, and a leaf of `tail_tokens` under the root."""

    def node(index: int, parent: int, start: int, first: int, length: int = _TOKENS) -> Node:
        return Node(index, parent, start, np.array([first] * length, dtype=np.int64))

    nodes = [
        node(0, -1, 0, 0),
        node(1, 0, _TOKENS, 0, _LONGER),
        node(2, 1, _TOKENS + _LONGER, 0),
        node(3, 0, _TOKENS, 1, tail_tokens),
    ]
    nodes[0].children, nodes[1].children = [1, 3], [2]
    return Tree(nodes, [2, 3], {2: _TOKENS + _LONGER, 3: _TOKENS})


def _probe_step(
    dtype: torch.dtype, sums: ParameterSums, kept: KeptActivations, tail_tokens: int = _TOKENS
) -> Step:
    tree = probe_tree(tail_tokens)
    ends = [
        NodeTerms(np.array([length - 1]), np.array([1]), np.array([True])) for length in (_TOKENS, _LONGER)
    ]
    none = NodeTerms(np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0, np.bool_))
    terms = Terms([*ends, none, none], [], [])
    step = make_step(
        tree,
        terms,
        namespace=b"probe",
        constants=frozenset(),
        graph=1,
        dtype=dtype,
        max_visit_tokens=tail_tokens,
        sums=sums,
    )
    step.keeping = {0: Keeping(kept), 1: Keeping(kept)}
    return step


def probe_shape(runner: Any, dtype: torch.dtype, sums: ParameterSums, kept: PrefixActivations) -> Shape:
    """Runs the probe's visits through a `VisitRunner`, whose model is on its stand-ins and attached.

    `sums` holds nothing of the probe's gradients afterwards.
    """
    if kept != "auto":
        return _probe(runner, dtype, sums, kept)
    base = _probe(runner, dtype, sums, "layer_inputs")
    others: dict[tuple[VisitKind, KeptActivations], tuple[Event, ...]] = {}
    for other in KEPT_ACTIVATIONS:
        if other != "layer_inputs":
            found = _probe(runner, dtype, sums, other)
            others |= {("capture", other): found.events["capture"], ("pop", other): found.events["pop"]}
    return replace(base, others=others, flops_per_token=_count_flops(runner, dtype, sums) / _TOKENS)


def _count_flops(runner: Any, dtype: torch.dtype, sums: ParameterSums) -> float:
    """Floating-point operations of a capture of the probe's root."""
    step = _probe_step(dtype, sums, "recompute")
    with FlopCounterMode(display=False) as counter:
        runner.capture(step, _Recorder(), 0)
    return float(counter.get_total_flops())


def _probe(runner: Any, dtype: torch.dtype, sums: ParameterSums, kept: KeptActivations) -> Shape:
    tail_tokens = _TOKENS_OF_STATES if runner.adapter.shortest_node > 1 else _TOKENS
    step, store = _probe_step(dtype, sums, kept, tail_tokens), _Recorder()
    if runner.balanced:
        step.balance = Balance(
            runner.adapter.routers.top_k, [torch.ones(len(node.tokens)) for node in step.tree.nodes]
        )
    events: dict[VisitKind, tuple[Event, ...]] = {}
    short: dict[tuple[int, str], int] = {}

    def visit(kind: VisitKind, node: int, run: Callable[[], None]) -> None:
        begin = len(store.accesses)
        run()
        mine = (step.digests[node], step.digests[0])
        events[kind] = tuple(
            _event(access, *mine, len(step.tree.nodes[node].tokens), short)
            for access in store.accesses[begin:]
        )

    runner.capture(step, store, 0)
    short |= {(key.layer, key.kind): size for _, key, size in store.accesses if of_graph(key.kind)}
    visit("capture", 1, lambda: runner.capture(step, store, 1))
    visit("score", 3, lambda: runner.score(step, store, (3,)))
    activations = _KeptBytes()
    with torch.autograd.graph.saved_tensors_hooks(activations.pack, lambda tensor: tensor):
        visit("replay", 3, lambda: runner.replay(step, store, (3,), None))
    runner.replay(step, store, (2,), None)
    visit("pop", 1, lambda: runner.pop(step, store, 1))
    sums.clear()
    per_token = max(1, activations.num_bytes // tail_tokens)
    return Shape(tuple(runner.adapter.router.specs.values()), events, per_token)


def _event(
    access: tuple[Operation, PageKey, int],
    own: bytes,
    above: bytes,
    own_tokens: int,
    short: dict[tuple[int, str], int],
) -> Event:
    """Of an access of a node of `own_tokens`, below one whose graph's pages have the sizes in `short`."""
    operation, key, size = access
    assert key.node in (own, above)
    is_own = key.node == own
    role: Literal["own", "ancestor"] = "own" if is_own else "ancestor"
    place = (key.layer, key.kind)
    if is_state(key.kind):
        return Event(operation, role, *place, size)
    if is_own and place in short:
        per_token = max(0, size - short[place]) // (own_tokens - _TOKENS)
        return Event(operation, role, *place, per_token, size - per_token * own_tokens)
    return Event(operation, role, *place, size // (own_tokens if is_own else _TOKENS))
