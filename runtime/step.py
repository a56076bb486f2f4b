"""The state of one tree on its way through the visits."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from tiercache.runtime.balance import Balance
from tiercache.runtime.frame import Frame
from tiercache.runtime.kernels import accumulator_dtype
from tiercache.runtime.options import KeptActivations
from tiercache.runtime.params import ParameterSums
from tiercache.runtime.routing import Choices
from tiercache.runtime.rows import TokenRow
from tiercache.runtime.saved_tensors import LayerInputs
from tiercache.runtime.schedule import VisitOrder
from tiercache.runtime.terms import Terms
from tiercache.runtime.tree import Tree
from tiercache.runtime.whole_graph import WholeGraph

RandomStates = tuple[torch.Tensor, torch.Tensor | None]


@dataclass(frozen=True, slots=True)
class Keeping:
    """What one node's capture leaves in the store.

    Attributes:
        kept: as in `ReplayOptions.prefix_activations`.
        num_bytes: beside the node's pages, until its pop; 0 where nothing was chosen among.
        saved_s: seconds expected to be saved against the cheapest choice.
        reason: in words.
        again_s: seconds to compute one layer's attention again, where that was kept and may be forgotten.
        popped: the node will be popped.
    """

    kept: KeptActivations
    num_bytes: int = 0
    saved_s: float = 0.0
    reason: str = "asked for"
    again_s: float | None = None
    popped: bool = True


@dataclass(slots=True)
class CapturedGraph:
    """What a capture leaves for the pop of its node, beside its pages.

    Attributes:
        frame: of the capture; the pop runs under the same one.
        inputs: what puts the graph's tensors into the store, when the graph was kept.
        hidden: [n, E] last hidden states of the node's terms: with their graph when it was kept, alone when
            the node is a constant, None when pop recomputes them.
        choices: of experts, kept in debug mode.
    """

    frame: Frame
    inputs: LayerInputs | WholeGraph | None = None
    hidden: torch.Tensor | None = None
    choices: Choices = field(default_factory=dict)


@dataclass(slots=True)
class Step:
    """One tree on its way through the visits.

    Attributes:
        tree: of the rows.
        terms: log-probabilities wanted of each node.
        digests: of each node's tokens, chained to its ancestors' and to the namespace.
        constants: nodes whose pages take no gradient.
        graph: id in the store.
        values: [n] log-probabilities of each node's terms, on the host; zeros until the node has run.
        gradients: [n] dL/dlogp of each node's terms, summed over rows, on the host.
        autocast: dtype of the autocast that the step's forwards run under, or None.
        statistics: columns of `STATISTICS` wanted beside each value.
        columns: [n, S] of them for each node's terms, on the host.
        keeping: for each captured node, what its capture leaves in the store for its pop, and why.
        max_visit_tokens: most tail tokens replayed together.
        sums: stand-ins that the visits' graphs lead to, and the sums of their gradients.
        versions: of the parameters when the step began.
        balance: the experts' load-balancing loss, where it is wanted.
        captured: graphs of captured nodes that are not popped yet.
        random_states: of the first run of each visit's nodes, for models that draw random numbers.
    """

    tree: Tree
    terms: Terms
    digests: list[bytes]
    constants: frozenset[int]
    graph: int
    values: list[torch.Tensor]
    gradients: list[torch.Tensor]
    max_visit_tokens: int
    sums: ParameterSums
    versions: tuple[int, ...]
    autocast: torch.dtype | None = None
    statistics: tuple[str, ...] = ()
    columns: dict[int, torch.Tensor] = field(default_factory=dict)
    balance: Balance | None = None
    keeping: dict[int, Keeping] = field(default_factory=dict)
    order: VisitOrder | None = None
    captured: dict[int, CapturedGraph] = field(default_factory=dict)
    random_states: dict[tuple[int, ...], RandomStates] = field(default_factory=dict)

    def kept(self, index: int) -> KeptActivations:
        """What a node's capture leaves for its pop; nothing of a leaf, which has neither."""
        keeping = self.keeping.get(index)
        return "recompute" if keeping is None else keeping.kept

    def check_parameters(self) -> None:
        """Raises ParameterChangedError, naming the parameter, when one was written since the step began."""
        self.sums.check_versions(self.versions)


def make_step(
    tree: Tree,
    terms: Terms,
    *,
    namespace: bytes,
    constants: frozenset[int],
    graph: int,
    dtype: torch.dtype,
    max_visit_tokens: int,
    sums: ParameterSums,
    autocast: torch.dtype | None = None,
    statistics: tuple[str, ...] = (),
) -> Step:
    """A step at its beginning; `dtype` is the model's."""
    values = [torch.zeros(len(t), dtype=accumulator_dtype(dtype)) for t in terms.of_node]
    gradients = [torch.zeros_like(v) for v in values]
    digests = chain_digests(tree, namespace)
    return Step(
        tree,
        terms,
        digests,
        constants,
        graph,
        values,
        gradients,
        max_visit_tokens,
        sums,
        sums.versions(),
        autocast=autocast,
        statistics=statistics,
    )


def place_values(
    step: Step, rows: Sequence[TokenRow], input_ids: torch.Tensor
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Log-probabilities [N, T] of a batch whose nodes have all run, and the step's statistics by name, each in
    the place of its token, on the device of input_ids; 0 where nothing is scored.
    """
    found = [step.values, *([c[:, i] for c in _columns(step)] for i in range(len(step.statistics)))]
    placed = []
    for values in found:
        batch = input_ids.new_zeros(input_ids.shape, dtype=step.values[0].dtype)
        for n, row in enumerate(rows):
            columns = torch.from_numpy(row.columns[row.scored]).to(batch.device)
            batch[n, columns] = step.terms.gather(values, n).to(batch.device, batch.dtype)
        placed.append(batch)
    return placed[0], dict(zip(step.statistics, placed[1:], strict=True))


def _columns(step: Step) -> list[torch.Tensor]:
    none = torch.zeros(0, len(step.statistics))
    return [step.columns.get(node.index, none) for node in step.tree.nodes]


def chain_digests(tree: Tree, namespace: bytes) -> list[bytes]:
    """A digest for each node of the tokens from the root on, and how they are cut, under `namespace`."""
    digests: list[bytes] = []
    for node in tree.nodes:
        above = digests[node.parent] if node.parent >= 0 else namespace
        digests.append(hashlib.blake2b(above + node.tokens.tobytes(), digest_size=32).digest())
    return digests


def needs_graph(step: Step, index: int) -> bool:
    """Whether gradients run through a node: not through a constant that scores no token of its own."""
    return index not in step.constants or not bool(step.terms.of_node[index].boundary.all())


def records_selection(step: Step, index: int) -> bool:
    """Whether what a node's queries select is kept for its pop."""
    keeping = step.keeping.get(index)
    return needs_graph(step, index) and (keeping is None or keeping.popped)
