"""BranchReplay: the gradient of dense training on a tree of rows, with each shared prefix run once."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import nn

from tiercache.errors import ConfigError, ModelRefusedError, PageMissingError, StoreClosedError
from tiercache.runtime.adapters import ModelAdapter, create_adapter
from tiercache.runtime.adapters.check import NODE_TOKENS, check_model
from tiercache.runtime.choosing import Live
from tiercache.runtime.delivery import deliver, differentiable
from tiercache.runtime.engine import Engine
from tiercache.runtime.head import check_statistics
from tiercache.runtime.losses import LossFn, row_loss
from tiercache.runtime.options import ReplayOptions
from tiercache.runtime.pages import StepPages
from tiercache.runtime.report import StepReport
from tiercache.runtime.rows import Row, TokenRow, check_batch, check_rows
from tiercache.runtime.schedule import Pass
from tiercache.runtime.step import Step, place_values
from tiercache.store import open_store

PROOF_BYTES = 1 << 30  # budget of the proof's pages: a few dozen tokens of any model


class BranchReplay:
    """Trains a causal language model on trees of rows: shared prefixes run once, gradients are those of dense
    training.

    Args:
        model: a Transformers causal LM (also under PEFT), or a plain module as `PlainAdapter` takes it. Not
            copied.
        store: a `tiercache.TierStore`; stays the caller's to close.
        options: fields of `ReplayOptions`.

    Attributes:
        report: of the last step, or None.
        auxiliary_loss: of the last `logprobs`, a scalar whose backward is one with that of the log-probabilities; None
            where the option of that name is off.
        statistics: [N, T] each, those that the last `logprobs` was asked for, by name.
    """

    def __init__(self, model: nn.Module, store: Any, **options: Any) -> None:
        self.options = ReplayOptions(**options)
        self.model, self.store = model, store
        self.adapter = create_adapter(model)
        self.engine = Engine(model, self.adapter, store, self.options)
        self.engine.sums.require_some()
        self.report: StepReport | None = None
        self.statistics: dict[str, torch.Tensor] = {}
        self.auxiliary_loss: torch.Tensor | None = None
        _check_auxiliary_loss(self.adapter, self.options)
        if self.options.check_model:
            check_model(self.adapter, _proof_scores, share_dropout=self.options.share_dropout)

    def backward(self, rows: Sequence[Row], loss_fn: LossFn) -> StepReport:
        """Adds the gradient of the sum of the rows' losses to the parameters' `.grad`.

        Args:
            rows: the batch. `Row`, or anything with its `tokens` and `scored`.
            loss_fn: (logps [T] in fp32 or fp64, row) -> scalar; logps are 0 where the row is not scored.

        Returns:
            What the step did; also kept as `self.report`.

        Raises:
            InputError: rows that cannot be trained on.
            LossError: loss_fn returned something that is no loss.
            ParameterChangedError: loss_fn wrote to a parameter.
            After any exception `.grad` is as it was and no page of the step is left.
        """
        parameters, gradients = self.gradients(rows, loss_fn)
        deliver(parameters, gradients)
        assert self.report is not None
        return self.report

    def gradients(
        self, rows: Sequence[Row], loss_fn: LossFn
    ) -> tuple[list[nn.Parameter], list[torch.Tensor | None]]:
        """What `backward` would add: the trainable parameters and the gradient of each, None where there is none."""
        checked = check_rows(rows, self.adapter.vocab_size)
        step = self.engine.make_step(checked, live="tree" if self.options.auxiliary_loss else "path")
        step.sums.require_some()
        report = _new_report(step, checked)
        losses: list[float] = []
        rows_of_leaf: dict[int, list[int]] = {}
        for index, leaf in enumerate(step.tree.leaf_of_row):
            rows_of_leaf.setdefault(leaf, []).append(index)

        def after_tails(leaves: tuple[int, ...]) -> None:
            for index in (r for leaf in leaves for r in rows_of_leaf[leaf]):
                logps = step.terms.gather(step.values, index).to(self.adapter.device)
                loss, grad = row_loss(loss_fn, logps, rows[index], checked[index], index)
                losses.append(loss)
                step.terms.scatter_add(step.gradients, index, grad)

        pages = StepPages(self.store, step.graph)
        sums = step.sums
        with report.timed("total"), report.watching(self.store):
            try:
                with self.engine.running(step.tree.longest_row, sums, step.autocast):
                    if step.balance is None:
                        self.engine.follow(step, "step", report=report)
                        self.engine.walk(step, pages, "step", report, after_tails)
                    else:
                        self._walk_twice(step, pages, report, after_tails)
                step.check_parameters()
                gradients = sums.take()
            finally:
                sums.clear()
                step.captured.clear()
                pages.drop_all()
                self.store.follow(None)
        if step.balance is not None:
            losses.append(step.balance.gradient * float(step.balance.loss))
        report.loss = sum(losses)
        self.report = report
        return sums.parameters, gradients

    def _walk_twice(
        self,
        step: Step,
        pages: StepPages,
        report: StepReport,
        after_tails: Callable[[tuple[int, ...]], None],
    ) -> None:
        """A step whose loss no tail knows before every token was seen once."""
        balance, routers = step.balance, self.adapter.routers
        assert balance is not None
        assert routers is not None
        self.engine.follow(step, "scores", "gradients", report=report)
        self.engine.walk(step, pages, "scores", report)
        after_tails(tuple(node.index for node in step.tree.nodes if node.is_leaf))
        step.check_parameters()
        balance.gradient = routers.coefficient
        self.engine.walk(step, pages, "gradients", report)

    def logprobs(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None,
        scored: torch.Tensor,
        *,
        statistics: tuple[str, ...] = (),
    ) -> torch.Tensor:
        """Log-probabilities of scored tokens, differentiable in the model's trainable parameters.

        Args:
            input_ids: [N, T] int64, padded on either side.
            attention_mask: [N, T], nonzero where a token is real, or None.
            scored: [N, T] bool, False in the first real column of each row.
            statistics: names among "entropy", "mean_logits", "is_top1" and "log_sum_sq_probs": of the scored
                tokens' distributions, without gradient, kept as `self.statistics`.

        Returns:
            [N, T] fp32 (fp64 for fp64 models) on the device of input_ids, 0 where not scored. Its backward
            replays the branches and pops the prefix; until then the pages stay in the store. Dropping it
            drops them.

        Raises:
            InputError: a batch that cannot be trained on.
            ConfigError: no such statistic, or no trainable parameter while gradients are on.
        """
        checked = check_batch(input_ids, attention_mask, scored, self.adapter.vocab_size)
        wants_gradient = torch.is_grad_enabled()
        live: Live = "tree" if wants_gradient else "nothing"
        step = self.engine.make_step(checked, check_statistics(statistics), live=live)
        if wants_gradient:
            step.sums.require_some()
        run = _Run(self, step, checked)
        try:
            with (
                self.engine.running(step.tree.longest_row, step.sums, step.autocast),
                run.report.timed("total"),
                run.report.watching(self.store),
            ):
                passes: tuple[Pass, ...] = ("scores", "gradients") if wants_gradient else ("scores",)
                self.engine.follow(step, *passes, report=run.report)
                self.engine.walk(step, run.pages, "scores", run.report)
        except BaseException:
            run.end()
            raise
        self.report = run.report
        values, self.statistics = place_values(step, checked, input_ids)
        if not wants_gradient:
            run.end()
            return values
        auxiliary = values.new_zeros(()) if step.balance is None else step.balance.loss.to(values)
        result, auxiliary = differentiable(run.gradients, values, auxiliary, step.sums.parameters)
        self.auxiliary_loss = None if step.balance is None else auxiliary
        return result


def _check_auxiliary_loss(adapter: ModelAdapter, options: ReplayOptions) -> None:
    """Raises where the model's configuration and the option disagree, or the model has no such loss."""
    if options.auxiliary_loss and adapter.routers is None:
        raise ConfigError(
            "auxiliary_loss",
            got=True,
            remedy=f"{adapter.described} computes no load-balancing loss of experts",
        )
    if adapter.wants_auxiliary_loss and options.check_model and not options.auxiliary_loss:
        raise ModelRefusedError(
            f"the experts of {adapter.described}: an auxiliary loss over all tokens of a batch",
            got="output_router_logits=True",
            limit="auxiliary_loss=True, or output_router_logits=False",
            remedy="pass auxiliary_loss=True to include it, or set config.output_router_logits = False",
        )


def _proof_scores(model: nn.Module, input_ids: torch.Tensor, scored: torch.Tensor) -> torch.Tensor:
    """Log-probs of a proof's rows as a tree of small nodes, over a store of their own."""
    with open_store(device=PROOF_BYTES) as store, torch.no_grad():
        replay = BranchReplay(
            model, store, check_model=False, min_shared_tokens=1, max_node_tokens=NODE_TOKENS
        )
        return replay.logprobs(input_ids, None, scored)


class _Run:
    """A `logprobs` call between its forward and its backward. Its pages go when it goes."""

    def __init__(self, replay: BranchReplay, step: Step, rows: list[TokenRow]) -> None:
        self.replay, self.step, self.rows = replay, step, rows
        self.pages = StepPages(replay.store, step.graph)
        self.report = _new_report(step, rows)
        self._finalizer = weakref.finalize(self, _drop_quietly, self.pages)

    def end(self) -> None:
        """Drops every page of the run."""
        self.step.captured.clear()
        if self._finalizer.detach():
            self.pages.drop_all()

    def gradients(self, grad: torch.Tensor, grad_auxiliary: torch.Tensor) -> list[torch.Tensor | None]:
        """Gradients of the parameters for dL/dlogp [N, T] and that of the auxiliary loss; ends the run."""
        if not self._finalizer.alive:
            raise PageMissingError(
                "backward of logprobs a second time: its pages are gone",
                remedy="call logprobs again; retain_graph cannot keep them",
            )
        engine, sums = self.replay.engine, self.step.sums
        try:
            self.step.check_parameters()
            if self.step.balance is not None:
                self.step.balance.gradient = float(grad_auxiliary)
            host = grad.detach().cpu()
            for n, row in enumerate(self.rows):
                mine = host[n, torch.from_numpy(row.columns[row.scored])]
                if len(mine):
                    self.step.terms.scatter_add(self.step.gradients, n, mine.to(self.step.gradients[0].dtype))
            running = engine.running(self.step.tree.longest_row, sums, self.step.autocast)
            with self.report.timed("total"), self.report.watching(self.replay.store), running:
                engine.follow(self.step, "gradients")
                engine.walk(self.step, self.pages, "gradients", self.report)
            return sums.take()
        finally:
            sums.clear()
            self.end()
            self.replay.store.follow(None)
            self.replay.report = self.report


def _drop_quietly(pages: StepPages) -> None:
    with suppress(StoreClosedError):
        pages.drop_all()


def _new_report(step: Step, rows: Sequence[TokenRow]) -> StepReport:
    tree = step.tree
    return StepReport(
        num_rows=len(rows),
        num_nodes=sum(not node.is_leaf for node in tree.nodes),
        dense_tokens=sum(len(row.tokens) for row in rows),
        captured_tokens=tree.num_inner_tokens,
        tail_tokens=tree.num_tail_tokens,
        kept=dict(Counter(keeping.kept for keeping in step.keeping.values())),
        reasons={keeping.kept: keeping.reason for keeping in step.keeping.values()},
    )
