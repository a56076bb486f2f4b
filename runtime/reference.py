"""Frozen models: log-probabilities whose prompts are captured once and read in every later step."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tiercache.entry import PageKey
from tiercache.errors import ConfigError, PageCorruptError, PageMissingError, TierIOError
from tiercache.runtime.access import content_keys
from tiercache.runtime.adapters import create_adapter
from tiercache.runtime.engine import Engine
from tiercache.runtime.head import check_statistics
from tiercache.runtime.identity import WeightsName
from tiercache.runtime.options import ReplayOptions
from tiercache.runtime.pages import StepPages
from tiercache.runtime.report import StepReport
from tiercache.runtime.rows import TokenRow, check_batch
from tiercache.runtime.schedule import plan_visits
from tiercache.runtime.step import Step, place_values

HIDDEN = "hidden"  # page of a node's last hidden states, beside its keys and values
OFFSETS = "offsets"  # page of their number and their offsets in the node, int64
_LOST = (PageCorruptError, PageMissingError, TierIOError)


@dataclass(frozen=True, slots=True)
class _Kept:
    """A node's pages, one reference of each, and the offsets whose hidden states are among them."""

    keys: list[PageKey]
    offsets: list[int]


class Reference:
    """Log-probabilities of a frozen model over a store, without gradients.

    Pages of prompts stay in the store from step to step: a later batch with the same prompt reads them instead
    of running it. They are keyed by the weights too, so that a reference that is synchronised with the policy
    misses. What a prompt has kept goes when `max_prompts` others were used since.

    In a store that keeps pages (`open_store(durability=...)`) they also outlive this object and this process: keyed
    by what the weights are, they are found again by any `Reference` on the same directory until disk room is
    needed. A page that cannot be read is captured again.

    Args:
        model: as `BranchReplay` takes it. Its parameters may be frozen or not; none is changed.
        store: a `tiercache.TierStore`; stays the caller's to close.
        max_prompts: nodes whose pages are kept. Give the store a disk tier before you raise it.
        weights_id: your name for the model's weights as they are now, and all else that its forward depends on, in
            place of a hash over the tensors (BLAKE2b) and the configuration. A plain module needs one. After a
            change of the weights they are hashed.
        options: fields of `ReplayOptions`.

    Attributes:
        report: of the last call; `captured_tokens` counts what was run, not what was read.
        reused_tokens: of the last call, read instead of captured.
        statistics: [N, T] each, those that the last call was asked for, by name.

    Raises:
        ConfigError: `weights_id` is missing, or has no effect.
    """

    def __init__(
        self,
        model: nn.Module,
        store: Any,
        *,
        max_prompts: int = 1024,
        weights_id: str | None = None,
        **options: Any,
    ) -> None:
        self.model, self.store, self.max_prompts = model, store, max_prompts
        self.adapter = create_adapter(model)
        self._check_weights_id(weights_id)
        given = {**options, "prefix_activations": "recompute"}  # nothing is popped
        self.engine = Engine(model, self.adapter, store, ReplayOptions(**given))
        self.engine.weights = WeightsName(model, weights_id=weights_id, lasting=store.keeps_pages).digest
        self.report: StepReport | None = None
        self.reused_tokens = 0
        self.statistics: dict[str, torch.Tensor] = {}
        self._kept: OrderedDict[bytes, _Kept] = OrderedDict()
        self._is_backwards = False  # a call begins with what the one before it left in the fast tiers

    def _check_weights_id(self, weights_id: str | None) -> None:
        if weights_id is not None and not self.store.keeps_pages:
            raise ConfigError(
                "weights_id: has no effect in a store that keeps no pages",
                got=weights_id,
                remedy='open it with disk=DIRECTORY and durability="process" or "power"',
            )
        if weights_id is None and self.store.keeps_pages and not self.adapter.identity_is_whole:
            raise ConfigError(
                f"weights_id: {type(self.model).__name__} does not say what its forward depends on",
                remedy="name its weights and settings with weights_id, anew when one changes",
            )

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
        columns = check_statistics(statistics)
        try:
            step = self._run(checked, columns, reuse=True)
        except _LOST:
            if not self.reused_tokens:
                raise
            step = self._run(checked, columns, reuse=False)
        values, self.statistics = place_values(step, checked, input_ids)
        return values

    def _run(self, checked: Sequence[TokenRow], statistics: tuple[str, ...], *, reuse: bool) -> Step:
        """All visits of a batch; without `reuse` every node is captured, whatever is kept of it."""
        step = self.engine.make_step(checked, statistics, live="nothing")
        pages = StepPages(self.store, step.graph, persistent=self.store.keeps_pages)
        report = _report(step, checked)
        self.reused_tokens = 0
        try:
            with (
                self.engine.running(step.tree.longest_row, step.sums, step.autocast),
                report.timed("total"),
            ):
                self._walk(step, pages, reuse=reuse)
        finally:
            step.captured.clear()
            pages.drop_all()
        report.captured_tokens -= self.reused_tokens
        self.report = report
        return step

    def _walk(self, step: Step, pages: StepPages, *, reuse: bool) -> None:
        if not reuse:
            for digest in step.digests:
                self._drop(digest)
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
            kept = self._find(step, node) if reuse else None
            if kept is None:
                self._keep(step, node, runner.capture(step, pages, node), pages)
                continue
            self.reused_tokens += len(step.tree.nodes[node].tokens)
            rows = [kept.offsets.index(offset) for offset in step.terms.of_node[node].offsets.tolist()]
            with self.store.read(PageKey(step.digests[node], 0, HIDDEN)) as lease:
                runner.score_hidden(step, pages, node, lease.tensor[rows])
        while len(self._kept) > self.max_prompts:  # after the step: its own nodes must outlive it
            self._drop(next(iter(self._kept)))

    def _find(self, step: Step, node: int) -> _Kept | None:
        """What is kept of a node, if it is all there and has the hidden states that this step wants."""
        digest = step.digests[node]
        kept = self._kept.get(digest)
        if kept is None or not all(self.store.contains(key) for key in kept.keys):
            kept = self._take_up(digest)
        if kept is None or not set(step.terms.of_node[node].offsets.tolist()) <= set(kept.offsets):
            return None
        self._kept.move_to_end(digest)
        return kept

    def _take_up(self, digest: bytes) -> _Kept | None:
        """What this process or an earlier one has left of a node on disk, if it is all there."""
        self._drop(digest)
        if not self.store.keeps_pages:
            return None
        shape = self.engine.shape(self.engine.sums)
        keys = [
            PageKey(digest, 0, OFFSETS),
            PageKey(digest, 0, HIDDEN),
            *content_keys(digest, shape, recorded=False),
        ]
        if not self.store.claim(keys, self.adapter.device):
            return None
        try:
            with self.store.read(keys[0]) as lease:
                offsets = lease.tensor.tolist()[1:]
        except _LOST:
            self.store.discard(keys)
            return None
        self._kept[digest] = _Kept(keys, offsets)
        return self._kept[digest]

    def _keep(self, step: Step, node: int, hidden: torch.Tensor, pages: StepPages) -> None:
        """Makes the references that a step holds of a node's pages this object's own."""
        digest = step.digests[node]
        self._drop(digest)
        offsets = step.terms.of_node[node].offsets.tolist()
        pages.put(PageKey(digest, 0, HIDDEN), hidden)
        if pages.persistent:
            pages.put(PageKey(digest, 0, OFFSETS), torch.tensor([len(offsets), *offsets]))
        keys = list(pages.held.pop(digest).elements())
        self._kept[digest] = _Kept(keys, offsets)

    def _drop(self, digest: bytes) -> None:
        kept = self._kept.pop(digest, None)
        if kept is not None:
            self.store.discard(kept.keys)

    def clear(self) -> None:
        """Drops every page that is kept, but for what outlives the store on disk."""
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
