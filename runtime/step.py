"""The state of one tree on its way through the visits."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

import torch

from tiercache.runtime.frame import Frame
from tiercache.runtime.kernels import accumulator_dtype
from tiercache.runtime.params import ParameterSums
from tiercache.runtime.routing import Choices
from tiercache.runtime.saved_tensors import LayerInputs
from tiercache.runtime.terms import Terms
from tiercache.runtime.tree import Tree

RandomStates = tuple[torch.Tensor, torch.Tensor | None]


@dataclass(slots=True)
class CapturedGraph:
    """What a capture leaves for the pop of its node, beside its pages.

    Attributes:
        frame: of the capture; the pop runs under the same one.
        inputs: layer inputs in the store, when the graph was kept.
        hidden: [n, E] last hidden states of the node's terms: with their graph when it was kept, alone when
            the node is a constant, None when pop recomputes them.
        choices: of experts, kept in debug mode.
    """

    frame: Frame
    inputs: LayerInputs | None = None
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
        max_visit_tokens: most tail tokens replayed together.
        sums: stand-ins that the visits' graphs lead to, and the sums of their gradients.
        versions: of the parameters when the step began.
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
    captured: dict[int, CapturedGraph] = field(default_factory=dict)
    random_states: dict[tuple[int, ...], RandomStates] = field(default_factory=dict)

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
) -> Step:
    """A step at its beginning; `dtype` is the model's."""
    values = [torch.zeros(len(t), dtype=accumulator_dtype(dtype)) for t in terms.of_node]
    gradients = [torch.zeros_like(v) for v in values]
    digests = chain_digests(tree, namespace)
    return Step(
        tree, terms, digests, constants, graph, values, gradients, max_visit_tokens, sums, sums.versions()
    )


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
