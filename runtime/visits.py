"""Running one visit: capture, score, replay or pop of nodes against their ancestors' pages."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from itertools import chain

import torch

from tiercache.runtime.adapters.base import ModelAdapter
from tiercache.runtime.checkpointing import checkpointed, own_checkpointing_off
from tiercache.runtime.frame import Ancestor, Frame, PageStore, Piece
from tiercache.runtime.head import ChunkedHead
from tiercache.runtime.memory import release_free_memory
from tiercache.runtime.routing import Choices, check_choices, recorded_choices
from tiercache.runtime.saved_tensors import LayerInputs
from tiercache.runtime.step import CapturedGraph, Step, needs_graph, records_selection
from tiercache.runtime.whole_graph import WholeGraph


class VisitRunner:
    """Runs visits of one model.

    Args:
        adapter: of the model.
        head: its vocabulary projection.
        share_dropout: the model draws random numbers; every later run of a node repeats those of its first.
        debug: compare recomputed pages with captured ones.
        balanced: the experts' load-balancing loss is wanted.
    """

    def __init__(
        self,
        adapter: ModelAdapter,
        head: ChunkedHead,
        *,
        share_dropout: bool,
        debug: bool,
        balanced: bool = False,
    ) -> None:
        self.adapter, self.head = adapter, head
        self.balanced = balanced
        self.share_dropout, self.debug = share_dropout, debug

    def frame(
        self,
        step: Step,
        store: PageStore,
        nodes: tuple[int, ...],
        phase: str,
        spent: frozenset[int] = frozenset(),
    ) -> Frame:
        """The frame of a visit of `nodes`, which share a parent; `spent` as in `Visit`."""
        tree, pieces, at = step.tree, [], 0
        for index in nodes:
            node = tree.nodes[index]
            pieces.append(Piece(index, step.digests[index], at, at + len(node.tokens), node.start))
            at += len(node.tokens)
        ancestors = [
            Ancestor(step.digests[a], tree.nodes[a].start, len(tree.nodes[a].tokens), a not in step.constants)
            for a in tree.path(nodes[0])[:-1]
        ]
        kept = step.kept(nodes[0]) if phase == "capture" and needs_graph(step, nodes[0]) else "recompute"
        return Frame(
            store,
            step.graph,
            pieces,
            ancestors,
            self.adapter.device,
            phase,
            keep_attention=kept == "attention",
            debug=self.debug,
            keep_graph=kept == "all",
            records_selection=phase == "capture" and records_selection(step, nodes[0]),
            balance=step.balance,
            spent=self._spent(step, spent),
        )

    def _spent(self, step: Step, nodes: frozenset[int]) -> frozenset[bytes]:
        """Digests of nodes whose pages go before their pop, which compares them where it is checked."""
        return frozenset() if self.debug else frozenset(step.digests[node] for node in nodes)

    def _hidden(self, step: Step, frame: Frame) -> torch.Tensor:
        """[n, E] last hidden states at the terms of the frame's nodes, in order."""
        device = self.adapter.device
        tokens = torch.cat([torch.from_numpy(step.tree.nodes[p.node].tokens) for p in frame.pieces])
        positions = torch.cat([torch.arange(p.position, p.position + p.end - p.begin) for p in frame.pieces])
        wanted = torch.cat(
            [torch.from_numpy(step.terms.of_node[p.node].offsets) + p.begin for p in frame.pieces]
        )
        nodes = tuple(p.node for p in frame.pieces)
        with self.adapter.router.running(frame), self._random_numbers(step, nodes):
            hidden = self.adapter.hidden(tokens[None].to(device), positions[None].to(device))
        if not len(wanted):  # the graph must still be driven, to relay what descendants send back
            wanted = torch.tensor([frame.num_tokens - 1])
        return hidden[0].index_select(0, wanted.to(device))

    @contextmanager
    def _random_numbers(self, step: Step, nodes: tuple[int, ...]) -> Iterator[None]:
        """Repeats the random numbers of these nodes' first run; the caller's generators are not touched."""
        if not self.share_dropout:
            yield
            return
        device = self.adapter.device
        module = torch.get_device_module(device) if device.type != "cpu" else None
        if nodes not in step.random_states:
            step.random_states[nodes] = (
                torch.get_rng_state(),
                module.get_rng_state(device) if module else None,
            )
            yield
            return
        with torch.random.fork_rng([device] if module else [], device_type=device.type if module else "cuda"):
            cpu_state, device_state = step.random_states[nodes]
            torch.set_rng_state(cpu_state)
            if module:
                module.set_rng_state(device_state, device)
            yield

    def targets(self, step: Step, frame: Frame) -> torch.Tensor:
        """[n] target tokens of the frame's terms, in order, on the device."""
        parts = [torch.from_numpy(step.terms.of_node[p.node].targets) for p in frame.pieces]
        return torch.cat(parts).to(self.adapter.device)

    def _keep_values(self, step: Step, frame: Frame, hidden: torch.Tensor, targets: torch.Tensor) -> None:
        sizes = [len(step.terms.of_node[p.node]) for p in frame.pieces]
        columns = self.head.values(hidden[: len(targets)], targets, step.statistics).cpu()
        for piece, values in zip(frame.pieces, columns.split(sizes), strict=True):
            step.values[piece.node] = values[:, 0].contiguous()
            step.columns[piece.node] = values[:, 1:]

    def _gradients(self, step: Step, frame: Frame) -> torch.Tensor:
        return torch.cat([step.gradients[p.node] for p in frame.pieces]).to(self.adapter.device)

    def capture(self, step: Step, store: PageStore, index: int) -> torch.Tensor:
        """Forward of an inner node: writes its pages, and what pop will need.

        Returns:
            [n, E] last hidden states of the node's terms, without a graph.
        """
        frame = self.frame(step, store, (index,), "capture")
        captured = CapturedGraph(frame)
        with self._choices() as captured.choices:
            hidden = self._capture(step, store, captured)
        step.captured[index] = captured
        targets = self.targets(step, frame)
        self._keep_values(step, frame, hidden, targets)
        return hidden

    def score_hidden(self, step: Step, store: PageStore, index: int, hidden: torch.Tensor) -> None:
        """Values of a node's terms from their last hidden states [n, E], without a forward."""
        frame = self.frame(step, store, (index,), "score")
        self._keep_values(step, frame, hidden, self.targets(step, frame))

    def _choices(self) -> AbstractContextManager[Choices]:
        return recorded_choices(self.adapter.model, self.adapter.layers, enabled=self.debug)

    def _capture(self, step: Step, store: PageStore, captured: CapturedGraph) -> torch.Tensor:
        """[n, E] last hidden states without a graph; what pop needs of one goes into `captured`."""
        frame, index = captured.frame, captured.frame.pieces[0].node
        if step.kept(index) != "recompute" and needs_graph(step, index):
            captured.inputs, layers = self._keeping(step, store, index)
            with captured.inputs.hooks(), layers, torch.enable_grad():
                captured.hidden = self._hidden(step, frame)
            return captured.hidden.detach()
        with torch.no_grad():
            hidden = self._hidden(step, frame)
        if not needs_graph(step, index):
            captured.hidden = hidden
        return hidden

    def _keeping(
        self, step: Step, store: PageStore, index: int
    ) -> tuple[LayerInputs | WholeGraph, AbstractContextManager[None]]:
        """Hooks that keep a node's graph in the store, and how the layers run meanwhile."""
        node, layers = step.digests[index], self.adapter.layers
        if step.kept(index) == "all":
            model = self.adapter.model
            owners = chain(model.parameters(), model.buffers())
            return WholeGraph(store, node, step.graph, owners), own_checkpointing_off(layers)
        inputs = LayerInputs(store, node, step.graph)
        return inputs, checkpointed(layers, preserve_rng_state=self.share_dropout)

    def score(self, step: Step, store: PageStore, leaves: tuple[int, ...]) -> None:
        """Forward of leaves, without a graph."""
        frame = self.frame(step, store, leaves, "score")
        targets = self.targets(step, frame)
        with torch.no_grad():
            hidden = self._hidden(step, frame)
        self._keep_values(step, frame, hidden, targets)

    def replay(
        self,
        step: Step,
        store: PageStore,
        leaves: tuple[int, ...],
        fill_gradients: Callable[[], None] | None,
        spent: frozenset[int] = frozenset(),
    ) -> None:
        """Forward and backward of leaves; `fill_gradients` is called between, once their values are known.

        `spent`: ancestors whose pages are given back on the way, as in `Visit`.
        """
        frame = self.frame(step, store, leaves, "replay", spent)
        with torch.enable_grad():
            hidden = self._hidden(step, frame)
        targets = self.targets(step, frame)
        if fill_gradients is not None:
            self._keep_values(step, frame, hidden.detach(), targets)
            fill_gradients()
        self._backward(step, frame, hidden, targets)

    def pop(self, step: Step, store: PageStore, index: int, spent: frozenset[int] = frozenset()) -> None:
        """Backward of a captured node, after all its descendants; `spent` as in `replay`."""
        captured = step.captured.pop(index)
        frame = captured.frame
        frame.phase, frame.spent = "pop", self._spent(step, spent)
        with self._choices() as again:
            if captured.hidden is None:
                with torch.enable_grad():
                    captured.hidden = self._hidden(step, frame)
            hidden, captured.hidden = captured.hidden, None
            self._backward(step, frame, hidden, self.targets(step, frame))
        check_choices(captured.choices, again)

    def _backward(self, step: Step, frame: Frame, hidden: torch.Tensor, targets: torch.Tensor) -> None:
        release_free_memory(self.adapter.device)  # of the forward, before the logits need more
        grad = torch.zeros_like(hidden)
        if len(targets):
            grad = self.head.gradient(hidden.detach(), targets, self._gradients(step, frame))
        if not hidden.requires_grad:
            return  # a constant node: only the projection's own gradient was wanted
        if frame.phase == "pop" and frame.pieces[0].node in step.constants:
            boundary = torch.from_numpy(step.terms.of_node[frame.pieces[0].node].boundary)
            grad[: len(boundary)][boundary.to(grad.device)] = 0
        recomputes = frame.phase == "pop" and step.kept(frame.pieces[0].node) != "recompute"
        layers = own_checkpointing_off(self.adapter.layers if recomputes else [])
        release_free_memory(self.adapter.device)  # of the forward and the logits, before backward needs more
        with self.adapter.router.running(frame), layers:
            torch.autograd.backward([hidden], [grad])
