"""Ranks: one tree shared out over the processes of torch.distributed, one reduced gradient a step.

rank 0        rank 1                 every rank: the same batch, the same tree
rows 0..3     rows 4..7              contiguous depth-first shares
capture root  capture root           a node that both need runs on both, each with its own partial sums
replay, pop   replay, pop
------- all-reduce of gradients ----- once a step, whatever the shares
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import distributed, nn
from torch.autograd.function import once_differentiable
from torch.nn.parallel import DistributedDataParallel

from tiercache.errors import ConfigError, InputError, RankFailedError
from tiercache.runtime.gathered import Gathered
from tiercache.runtime.losses import LossFn
from tiercache.runtime.replay import BranchReplay
from tiercache.runtime.report import StepReport
from tiercache.runtime.rows import Row, TokenRow, check_batch, check_rows
from tiercache.runtime.shares import duplicated_tokens, share_rows

Value = TypeVar("Value")


def rank_directory(directory: str | Path, group: Any = None) -> Path:
    """The folder of this rank's own store under a common one: `open_store(disk=rank_directory(d))`."""
    return Path(directory) / f"rank-{distributed.get_rank(group):05d}"


class DistributedReplay:
    """`BranchReplay` over all ranks of a process group: each runs its share of one tree.

    Every rank calls the same methods with the same batch. Gradients are sums over the batch, equal on every
    rank, as one process would give them: don't divide by the number of ranks. A rank that fails makes the
    call fail on every rank.

    Args:
        model: a causal LM as `BranchReplay` takes it, bare, in DDP, or under FSDP2 (`fully_shard`). DDP's own
            reduction is not used. FSDP2's parameters are gathered once a step.
        store: of this rank.
        group: of torch.distributed; the default one by default.
        options: fields of `ReplayOptions`.

    Attributes:
        report: of this rank's share of the last step; `duplicated_tokens` is of the whole step.
    """

    def __init__(self, model: nn.Module, store: Any, *, group: Any = None, **options: Any) -> None:
        if not distributed.is_initialized():
            raise ConfigError(
                "DistributedReplay without a process group",
                remedy="start with torchrun and call torch.distributed.init_process_group, or use BranchReplay",
            )
        if options.get("auxiliary_loss"):
            raise ConfigError(
                "auxiliary_loss over ranks",
                got=True,
                limit="one process",
                remedy="it needs every rank's tokens before any backward; leave it off",
            )
        self.model = model.module if isinstance(model, DistributedDataParallel) else model
        self.group, self.rank = group, distributed.get_rank(group)
        self.num_ranks = distributed.get_world_size(group)
        with Gathered(self.model).installed():
            self._replay = self._together(lambda: BranchReplay(self.model, store, **options))
        self.report: StepReport | None = None

    def backward(self, rows: Sequence[Row], loss_fn: LossFn) -> StepReport:
        """Adds the gradient of the sum of all rows' losses to the parameters' `.grad` of every rank.

        Args:
            rows: the whole batch, the same on every rank.
            loss_fn: as `BranchReplay.backward` takes it; called for this rank's rows.

        Raises:
            RankFailedError: another rank failed; its error is in the message.
            InputError: ranks were given different batches.
            Whatever `BranchReplay.backward` raises. `.grad` is then as it was on every rank.
        """
        gathered = Gathered(self.model)
        vocab = self._replay.adapter.vocab_size
        with gathered.installed():
            mine, duplicated = self._share(lambda: check_rows(rows, vocab))

            def run() -> list[torch.Tensor | None]:
                if not mine:
                    return [None] * len(gathered.owned)
                return self._replay.gradients([rows[n] for n in mine], loss_fn)[1]

            gradients = self._together(run)
        _add(gathered.owned, gathered.reduced(gradients, self.group))
        report = self._finish(mine, duplicated)
        loss = torch.tensor([report.loss if mine else 0.0], dtype=torch.float64)
        distributed.all_reduce(loss, group=self.group)
        report.loss = float(loss)
        return report

    def logprobs(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None, scored: torch.Tensor
    ) -> torch.Tensor:
        """Log-probabilities [N, T] of the whole batch on every rank, as `BranchReplay.logprobs` gives them.

        Any loss may be made of them, the same one on every rank. Its backward is a collective call. Under
        FSDP2 the gathered parameters are held until then.
        """
        gathered = Gathered(self.model)
        vocab = self._replay.adapter.vocab_size
        with gathered.installed():
            mine, duplicated = self._share(lambda: check_batch(input_ids, attention_mask, scored, vocab))

            def run() -> torch.Tensor | None:
                if not mine:
                    return None
                mask = None if attention_mask is None else attention_mask[mine]
                return self._replay.logprobs(input_ids[mine], mask, scored[mine])

            local = self._together(run)
        values = torch.zeros_like(input_ids, dtype=_values_dtype(self._replay))
        if local is not None:
            values[mine] = local.detach()
        distributed.all_reduce(values, group=self.group)
        self._finish(mine, duplicated)
        if not torch.is_grad_enabled():
            return values
        share = _Share(self, gathered, mine, local)
        result: torch.Tensor = _Batch.apply(share, values, *gathered.owned)  # type: ignore[no-untyped-call]
        return result

    def _share(self, check: Callable[[], list[TokenRow]]) -> tuple[list[int], int]:
        """This rank's rows and the step's duplicated tokens; proves that ranks have the same batch."""
        checked = self._together(check)
        digest = hashlib.blake2b(digest_size=16)
        for row in checked:
            digest.update(row.tokens.tobytes() + row.scored.tobytes() + b"/")
        digests: list[bytes | None] = [None] * self.num_ranks
        distributed.all_gather_object(digests, digest.digest(), group=self.group)
        others = [rank for rank, other in enumerate(digests) if other != digests[0]]
        if others:
            raise InputError(
                "ranks have different batches",
                got=f"ranks {others} differ from rank 0",
                remedy="give every rank the whole batch of the step",
            )
        tree = self._together(lambda: self._replay.engine.make_tree(checked))
        shares = share_rows(tree, self.num_ranks)
        return shares[self.rank], duplicated_tokens(tree, shares)

    def _together(self, run: Callable[[], Value]) -> Value:
        """Runs something on each rank; raises on all when it failed on one."""
        value, error = None, None
        try:
            value = run()
        except Exception as caught:  # every rank must come to the call below, whatever went wrong
            error = caught
        texts: list[str | None] = [None] * self.num_ranks
        text = None if error is None else f"{type(error).__name__}: {error}"
        distributed.all_gather_object(texts, text, group=self.group)
        if error is not None:
            raise error
        for rank, other in enumerate(texts):
            if other is not None:
                raise RankFailedError(
                    f"rank {rank} failed", got=other, remedy="its own output has the whole traceback"
                )
        return value  # type: ignore[return-value]

    def _finish(self, mine: list[int], duplicated: int) -> StepReport:
        report = self._replay.report if mine else None
        self.report = report if report is not None else StepReport()
        self.report.duplicated_tokens = duplicated
        return self.report


class _Share:
    """What a rank keeps of a `logprobs` call until its backward."""

    def __init__(
        self, replay: DistributedReplay, gathered: Gathered, rows: list[int], local: torch.Tensor | None
    ) -> None:
        self.replay, self.gathered, self.rows, self.local = replay, gathered, rows, local

    def gradients(self, grad: torch.Tensor) -> list[torch.Tensor | None]:
        """Reduced gradients of the owned parameters for dL/dlogp [N, T] of the whole batch."""
        local, self.local = self.local, None

        def run() -> list[torch.Tensor | None]:
            if local is None:
                return [None] * len(self.gathered.owned)
            inputs = [p for p in self.replay.model.parameters() if p.requires_grad]
            return list(torch.autograd.grad(local, inputs, grad[self.rows], allow_unused=True))

        with self.gathered.installed():
            gradients = self.replay._together(run)  # noqa: SLF001 - one collective call for both
        return self.gathered.reduced(gradients, self.replay.group)


class _Batch(torch.autograd.Function):
    """Makes every rank's parameters inputs of the whole batch's log-probabilities, rows or no rows."""

    @staticmethod
    def forward(ctx: Any, share: _Share, values: torch.Tensor, *owned: torch.Tensor) -> torch.Tensor:
        del owned
        ctx.share = share
        return values.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return (None, None, *ctx.share.gradients(grad))


def _values_dtype(replay: BranchReplay) -> torch.dtype:
    return torch.float64 if replay.engine.dtype == torch.float64 else torch.float32


def _add(parameters: list[nn.Parameter], gradients: list[torch.Tensor | None]) -> None:
    for parameter, gradient in zip(parameters, gradients, strict=True):
        if gradient is not None:
            parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
