"""Walking a tree's visits: what `logprobs` and `backward` share."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from tiercache.runtime.access import node_bytes, plan_accesses
from tiercache.runtime.adapters.base import ModelAdapter
from tiercache.runtime.balance import Balance, token_weights
from tiercache.runtime.choosing import Chooser, Live
from tiercache.runtime.head import ChunkedHead
from tiercache.runtime.limits import Limits, choose_limits
from tiercache.runtime.memory import release_free_memory
from tiercache.runtime.needs import check_budgets
from tiercache.runtime.options import ReplayOptions
from tiercache.runtime.pages import StepPages
from tiercache.runtime.params import ParameterSums
from tiercache.runtime.probe import Shape, probe_shape
from tiercache.runtime.report import StepReport
from tiercache.runtime.rows import TokenRow
from tiercache.runtime.schedule import Pass, Visit, VisitOrder, best_order, plan_visits
from tiercache.runtime.step import Step, make_step
from tiercache.runtime.terms import collect_terms
from tiercache.runtime.tree import Tree, build_tree
from tiercache.runtime.visits import VisitRunner
from tiercache.runtime.window import constant_nodes, split_at_window

AfterTails = Callable[[tuple[int, ...]], None]


class Engine:
    """Runs steps of one model over one store.

    Args:
        model: the user's.
        adapter: of the model.
        store: a `TierStore`.
        options: of the replay.
    """

    def __init__(self, model: nn.Module, adapter: ModelAdapter, store: Any, options: ReplayOptions) -> None:
        self.model, self.adapter, self.store, self.options = model, adapter, store, options
        self.head = ChunkedHead(adapter.project, adapter.vocab_size, options.head_bytes, options.temperature)
        self.runner = VisitRunner(
            adapter,
            self.head,
            share_dropout=options.share_dropout,
            debug=options.debug,
            balanced=options.auxiliary_loss,
        )
        self.chooser = Chooser(options, store, adapter.device)
        self.sums = ParameterSums(model, sum_in_fp32=options.sum_in_fp32)
        self.weights: Callable[[], bytes] = self._versions
        self._shape: tuple[bytes, Shape] | None = None

    @property
    def dtype(self) -> torch.dtype:
        """Of the model's parameters."""
        return next(p.dtype for p in self.model.parameters() if p.is_floating_point())

    @property
    def autocast(self) -> torch.dtype | None:
        """Dtype of the autocast that is on for the model's device, or None."""
        device = self.adapter.device.type
        return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None

    def refresh(self) -> None:
        """New stand-ins when the user has exchanged, frozen or thawed parameters."""
        if not self.sums.matches(self.model):
            self.sums = ParameterSums(self.model, sum_in_fp32=self.options.sum_in_fp32)

    def limits(self, longest_row: int) -> Limits:
        """How long nodes and visits may be."""
        self.refresh()
        with self.running(longest_row, self.sums, self.autocast):
            shape = self.shape(self.sums)
        on_host = self.adapter.device.type == "cpu"
        return choose_limits(self.options, shape, self.store.config.device_bytes, on_host=on_host)

    def page_sizes(self) -> dict[str, int]:
        """Bytes of a prefix token's pages, of those pages if they held keys and values, and of a node's states."""
        self.refresh()
        with self.running(1, self.sums, self.autocast):
            shape = self.shape(self.sums)
        return {
            "prefix_bytes_per_token": shape.prefix_bytes_per_token,
            "expanded_bytes_per_token": shape.expanded_bytes_per_token,
            "state_bytes": shape.state_bytes,
        }

    def make_tree(self, rows: Sequence[TokenRow]) -> Tree:
        """The tree of a batch, cut as the options and limits say."""
        limits = self.limits(max(len(row.tokens) for row in rows))
        tree = build_tree(
            rows,
            min_shared_tokens=self.options.min_shared_tokens,
            max_node_tokens=limits.max_node_tokens,
            max_tail_tokens=limits.max_tail_tokens,
            shortest_node=self.adapter.shortest_node,
        )
        window = self.options.window
        return tree if window is None else split_at_window(tree, window, self.adapter.shortest_node)

    def make_step(
        self, rows: Sequence[TokenRow], statistics: tuple[str, ...] = (), *, live: Live = "path"
    ) -> Step:
        """The state of a new step on a batch, on the parameters as they are now; `live` as in `Chooser.choose`."""
        self.refresh()
        tree = self.make_tree(rows)
        window = self.options.window
        step = make_step(
            tree,
            collect_terms(tree, rows),
            namespace=self._namespace(tree.longest_row),
            constants=frozenset() if window is None else constant_nodes(tree, window),
            graph=self.store.new_graph(),
            dtype=self.dtype,
            max_visit_tokens=self.limits(tree.longest_row).max_visit_tokens,
            sums=self.sums,
            autocast=self.autocast,
            statistics=statistics,
        )
        with self.running(tree.longest_row, self.sums, self.autocast):
            shape = self.shape(self.sums)
        if self.options.auxiliary_loss:
            assert self.adapter.routers is not None, "refused at construction"
            step.balance = Balance(self.adapter.routers.top_k, token_weights(tree, rows))
        step.keeping = self.chooser.choose(tree, shape, self.dtype, live, self.autocast)
        if live == "tree":
            step.order = self._order(tree, shape)
        return step

    def _order(self, tree: Tree, shape: Shape) -> VisitOrder | None:
        """The best order for two walks where that matters: all pages don't fit the device, but those of a path do."""
        sizes = [0 if node.is_leaf else node_bytes(shape, len(node.tokens)) for node in tree.nodes]
        capacity_bytes = self.store.config.device_bytes
        longest = max(sum(sizes[n] for n in tree.path(leaf)) for leaf in tree.branch_start)
        if not longest <= capacity_bytes < sum(sizes):
            return None
        return best_order(tree, sizes, capacity_bytes, 2)

    def visits(self, step: Step, passes: Pass) -> list[Visit]:
        """Of one walk of a step."""
        return plan_visits(step.tree, max_visit_tokens=step.max_visit_tokens, passes=passes, order=step.order)

    def _namespace(self, longest_row: int) -> bytes:
        """Digest of all that a page's values depend on beside its tokens."""
        digest = hashlib.blake2b(self.adapter.identity() + self.adapter.identity_of_length(longest_row))
        assert self._shape is not None, "limits() probes it first"
        digest.update(str(self.autocast).encode() + repr(self._shape[1].layers).encode())
        digest.update(self.weights())
        return digest.digest()

    def _versions(self) -> bytes:
        """What the weights are called where pages don't outlive the step: where they lie, and their versions."""
        digest = hashlib.blake2b()
        for parameter in self.model.parameters():
            digest.update(struct.pack("<qq", parameter.data_ptr(), parameter._version))  # noqa: SLF001
        return digest.digest()

    @contextmanager
    def running(self, longest_row: int, sums: ParameterSums, autocast: torch.dtype | None) -> Iterator[None]:
        """The model on the stand-ins of `sums`, its attention led here, under this autocast or none.

        Casts of weights aren't cached: a cast that one visit's graph made must not end up in another's.
        """
        device = self.adapter.device.type
        casting = torch.autocast(device, autocast, enabled=autocast is not None, cache_enabled=False)
        with sums.installed(), self.adapter.attached(longest_row), casting:
            yield

    def shape(self, sums: ParameterSums) -> Shape:
        """The model's accesses, probed anew when its modes have changed. Runs inside `running`."""
        modes = bytes(bool(getattr(m, "gradient_checkpointing", False)) for m in self.model.modules())
        state = self.adapter.identity() + modes + str(self.autocast).encode()
        if self._shape is None or self._shape[0] != state:
            with torch.random.fork_rng(enabled=self.options.share_dropout):
                self._shape = (
                    state,
                    probe_shape(self.runner, self.dtype, sums, self.options.prefix_activations),
                )
            release_free_memory(self.adapter.device)
        return self._shape[1]

    def take_shape_of(self, other: Engine) -> None:
        """Takes over what an engine of the same model has probed, so that the model is not probed again.

        The accesses are then those of the other's `prefix_activations`: enough for limits, not for a plan to follow.
        """
        self._shape = other._shape

    def follow(self, step: Step, *passes: Pass, report: StepReport | None = None) -> None:
        """Makes the accesses of these walks, one after the other, the store's known future, and the report's.

        Raises:
            TierFullError: the budgets are below what the walks need; the message names the minimum.
        """
        shape = self.shape(step.sums)
        visits = [visit for name in passes for visit in self.visits(step, name)]
        plan = plan_accesses(self.runner, step, visits, shape)
        check_budgets(plan, self.store)
        if report is not None:
            report.follow(plan)
        self.store.follow(plan)

    def walk(
        self,
        step: Step,
        pages: StepPages,
        passes: Pass,
        report: StepReport,
        after_tails: AfterTails | None = None,
    ) -> None:
        """Carries out one walk; `after_tails` is called between leaves' forward and backward."""
        for visit in self.visits(step, passes):
            nodes = ", ".join(str(node) for node in visit.nodes)
            with report.timed(visit.kind), self.store.span(f"{visit.kind} {nodes}"):
                self._visit(step, pages, visit, after_tails)
                release_free_memory(self.adapter.device)
            report.gradient_sum_bytes = max(report.gradient_sum_bytes, step.sums.num_bytes)

    def _visit(self, step: Step, pages: StepPages, visit: Visit, after_tails: AfterTails | None) -> None:
        if visit.kind == "capture":
            self.runner.capture(step, pages, visit.nodes[0])
        elif visit.kind == "score":
            self.runner.score(step, pages, visit.nodes)
        elif visit.kind == "replay":
            fill = None if after_tails is None else partial(_fill, step, visit.nodes, after_tails)
            self.runner.replay(step, pages, visit.nodes, fill, visit.spent)
        else:
            step.check_parameters()
            self.runner.pop(step, pages, visit.nodes[0], visit.spent)
            pages.drop_node(step.digests[visit.nodes[0]])


def _fill(step: Step, leaves: tuple[int, ...], after_tails: AfterTails) -> None:
    """Lets the caller's losses run between forward and backward; they must leave the weights alone."""
    after_tails(leaves)
    step.check_parameters()
