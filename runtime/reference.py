"""Frozen models: log-probabilities whose prompts are captured once and read in every later step."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tiercache.entry import PageKey
from tiercache.runtime.adapters import create_adapter
from tiercache.runtime.engine import Engine
from tiercache.runtime.head import check_statistics
from tiercache.runtime.options import ReplayOptions
from tiercache.runtime.pages import StepPages
from tiercache.runtime.report import StepReport
from tiercache.runtime.rows import TokenRow, check_batch
from tiercache.runtime.schedule import plan_visits
from tiercache.runtime.step import Step, place_values

HIDDEN = "hidden"  # page of a node's last hidden states, beside its keys and values


@dataclass(frozen=True, slots=True)
class _Kept:
    """A node's pages, one reference of each, and the offsets whose hidden states are among them."""

    keys: list[PageKey]
    offsets: list[int]


class Reference:
    """Log-probabilities of a frozen model over a store, without gradients.

    Pages of prompts stay in the store from step to step: a later batch with the same prompt reads them instead
    of running it. They are keyed by the weights and their versions too, so that a reference that is
    synchronised with the policy misses. What a prompt has kept goes when `max_prompts` others were used since.

    Args:
        model: as `BranchReplay` takes it. Its parameters may be frozen or not; none is changed.
        store: a `tiercache.TierStore`; stays the caller's to close.
        max_prompts: nodes whose pages are kept. Give the store a disk tier before you raise it.
        options: fields of `ReplayOptions`.

    Attributes:
        report: of the last call; `captured_tokens` counts what was run, not what was read.
        reused_tokens: of the last call, read instead of captured.
        statistics: [N, T] each, those that the last call was asked for, by name.
    """

    def __init__(self, model: nn.Module, store: Any, *, max_prompts: int = 1024, **options: Any) -> None:
        self.model, self.store, self.max_prompts = model, store, max_prompts
        self.adapter = create_adapter(model)
        given = {**options, "prefix_activations": "recompute"}  # nothing is popped
        self.engine = Engine(model, self.adapter, store, ReplayOptions(**given))
        self.report: StepReport | None = None
        self.reused_tokens = 0
        self.statistics: dict[str, torch.Tensor] = {}
        self._kept: OrderedDict[bytes, _Kept] = OrderedDict()
        self._is_backwards = False  # a call begins with what the one before it left in the fast tiers

    @torch.no_grad()
    def logprobs(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None,
        scored: torch.Tensor,
        *,
        statistics: tuple[str, ...] = (),
    ) -> torch.Tensor:
        """[N, T] log-probabilities, as `BranchReplay.logprobs` gives them without gradients."""
        checked = check_batch(input_ids, attention_mask, scored, self.adapter.vocab_size)
        step = self.engine.make_step(checked, check_statistics(statistics), live="nothing")
        pages = StepPages(self.store, step.graph)
        report = _report(step, checked)
        self.reused_tokens = 0
        try:
            with (
                self.engine.running(step.tree.longest_row, step.sums, step.autocast),
                report.timed("total"),
            ):
                self._walk(step, pages)
        finally:
            step.captured.clear()
            pages.drop_all()
        report.captured_tokens -= self.reused_tokens
        self.report = report
        values, self.statistics = place_values(step, checked, input_ids)
        return values

    def _walk(self, step: Step, pages: StepPages) -> None:
        runner = self.engine.runner
        visits = plan_visits(
            step.tree, max_visit_tokens=step.max_visit_tokens, passes="scores", backwards=self._is_backwards
        )
        self._is_backwards = not self._is_backwards
        for visit in visits:
            if visit.kind == "score":
                runner.score(step, pages, visit.nodes)
                continue
            node = visit.nodes[0]
            kept = self._find(step, node)
            if kept is None:
                self._keep(step, node, runner.capture(step, pages, node), pages)
                continue
            rows = [kept.offsets.index(offset) for offset in step.terms.of_node[node].offsets.tolist()]
            with self.store.read(PageKey(step.digests[node], 0, HIDDEN)) as lease:
                runner.score_hidden(step, pages, node, lease.tensor[rows])
            self.reused_tokens += len(step.tree.nodes[node].tokens)
        while len(self._kept) > self.max_prompts:  # after the step: its own nodes must outlive it
            self._drop(next(iter(self._kept)))

    def _find(self, step: Step, node: int) -> _Kept | None:
        """What is kept of a node, if it is all there and has the hidden states that this step wants."""
        digest = step.digests[node]
        kept = self._kept.get(digest)
        wanted = set(step.terms.of_node[node].offsets.tolist())
        if kept is None or not wanted <= set(kept.offsets):
            return None
        if not all(self.store.contains(key) for key in kept.keys):
            return None
        self._kept.move_to_end(digest)
        return kept

    def _keep(self, step: Step, node: int, hidden: torch.Tensor, pages: StepPages) -> None:
        """Makes the references that a step holds of a node's pages this object's own."""
        digest = step.digests[node]
        self._drop(digest)
        pages.put(PageKey(digest, 0, HIDDEN), hidden)
        keys = list(pages.held.pop(digest).elements())
        self._kept[digest] = _Kept(keys, step.terms.of_node[node].offsets.tolist())

    def _drop(self, digest: bytes) -> None:
        kept = self._kept.pop(digest, None)
        if kept is not None:
            self.store.discard(kept.keys)

    def clear(self) -> None:
        """Drops every page that is kept."""
        for digest in list(self._kept):
            self._drop(digest)


def _report(step: Step, rows: Sequence[TokenRow]) -> StepReport:
    tree = step.tree
    return StepReport(
        num_rows=len(rows),
        num_nodes=sum(not node.is_leaf for node in tree.nodes),
        dense_tokens=sum(len(row.tokens) for row in rows),
        captured_tokens=tree.num_inner_tokens,
        tail_tokens=tree.num_tail_tokens,
    )
