"""TRL trainers whose prompts run once an optimizer step, with the gradient of TRL's own.

TRL shuffles a generation batch and then splits it into micro-batches, so that the completions of one prompt
scatter over them. Here a micro-batch is only kept until the last one of the optimizer step has come; then all
rows are scored as one tree, each micro-batch's loss is computed by TRL's own code from its share of the
log-probabilities, and one backward drives their sum.

    micro-batch   1     2     3     4 = last of the step
    TRL           f b   f b   f b   f b        f forward, b backward, of every row whole
    here          -     -     -     score the tree, 4 losses, one backward
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from trl import DPOTrainer, GRPOTrainer
from trl.trainer.utils import use_adapter

from tiercache.errors import ConfigError
from tiercache.runtime.adapters.base import without_peft
from tiercache.runtime.reference import Reference
from tiercache.runtime.replay import BranchReplay
from tiercache.runtime.report import StepReport
from tiercache.runtime.trainers.fused_head import IGNORED, Scorer, TreeHead
from tiercache.runtime.trainers.micro_batches import MicroBatch, SliceModel, joined
from tiercache.runtime.trainers.refusals import (
    ANYWHERE,
    CHANGE_PROMPT,
    GRPO,
    check_ours,
    refuse,
    refuse_arguments,
    refuse_model,
)

DPO_STATISTICS = ("entropy", "mean_logits", "is_top1")


class TreeTrainer:
    """Mixin for a TRL trainer: put it before GRPOTrainer, DPOTrainer or your own subclass of one.

    Args:
        *args: of the trainer.
        store: a `tiercache.TierStore`; stays the caller's to close.
        replay_options: fields of `ReplayOptions` for the policy and, gradients aside, the reference; the temperature
            is the trainer's.
        reference_prompts: prompts of a reference model whose pages stay in the store from step to step; of use
            when prompts come again. Give the store a disk tier for them. With `open_store(durability=...)` they stay
            for later runs too.
        reference_weights_id: as `Reference` takes it.
        **kwargs: of the trainer.

    Attributes:
        replay: of the policy; `replay.report` says what its last step did.
        reference: of the reference model, or of the policy without its adapters; None where the loss needs neither.

    Raises:
        ConfigError: names an option that is not supported.
    """

    refused_options: tuple[tuple[str, str], ...] = ANYWHERE
    model: Any
    ref_model: Any
    accelerator: Any
    beta: float

    def __init__(
        self,
        *args: Any,
        store: Any,
        replay_options: dict[str, Any] | None = None,
        reference_prompts: int = 0,
        reference_weights_id: str | None = None,
        **kwargs: Any,
    ) -> None:
        config = kwargs.get("args") or next((a for a in args if hasattr(a, "learning_rate")), None)
        refuse(config, self.refused_options)
        refuse_arguments(kwargs)
        check_ours(store, replay_options, reference_prompts)
        super().__init__(*args, **kwargs)
        refuse_arguments({name: getattr(self, attribute, None) for name, attribute in CHANGE_PROMPT.items()})
        refuse_model(self)
        self.tree_store = store
        self.tree_options = {
            "temperature": float(getattr(self, "temperature", 1.0)),
            **(replay_options or {}),
        }
        self.reference: Reference | None = None
        self._waiting: list[tuple[Any, MicroBatch]] = []
        causal = self._causal(self.model)
        self.replay = BranchReplay(causal, store, **self.tree_options)
        self._reference_head = self._attach(causal, lambda: self._scorer())
        self.reference = self._make_reference(causal, reference_prompts, reference_weights_id)

    def _make_reference(self, policy: Any, max_prompts: int, weights_id: str | None) -> Reference | None:
        """Of a model of its own, or of the policy without its adapters; None where the loss has no use for one."""
        given = {**self.tree_options, "max_prompts": max_prompts, "weights_id": weights_id}
        if getattr(self, "ref_model", None) is not None:
            causal = self._causal(self.ref_model)
            reference = Reference(causal, self.tree_store, **given)
            self._reference_head = self._attach(causal, lambda: reference)
            return reference
        if _tuner_layer(policy) is not None and self.beta != 0:
            with self._as_reference():
                return Reference(policy, self.tree_store, **given)
        for name, value in (("reference_prompts", max_prompts), ("reference_weights_id", weights_id)):
            if value:
                raise ConfigError(
                    f"{name}: has no effect without a reference model", got=value, remedy="leave it out"
                )
        return None

    def _as_reference(self) -> Any:
        """A context in which the policy is its own reference: without adapters, or with those it began with."""
        unwrapped = self.accelerator.unwrap_model(self.model)
        return use_adapter(unwrapped, "ref" if "ref" in unwrapped.peft_config else None)

    def _scorer(self) -> Scorer:
        """Of a call to the policy's model, which is the reference while its adapters are switched."""
        if self.reference is not None and getattr(self, "ref_model", None) is None:
            layer = _tuner_layer(self.reference.model)
            if layer is not None and (layer.disable_adapters or "ref" in layer.active_adapters):
                return self.reference
        return self.replay

    @property
    def tree_statistics(self) -> tuple[str, ...]:
        """What the loss and its metrics want of each token's distribution beside its log-probability."""
        return ()

    def _causal(self, model: Any) -> Any:
        """The causal LM inside accelerate's and PEFT's wrappers."""
        adapters = getattr(model, "active_peft_config", None)
        if adapters is not None and adapters.is_prompt_learning:
            raise ConfigError(
                f"peft_config: {type(adapters).__name__} prepends virtual tokens",
                remedy="use LoRA or another adapter of weights",
            )
        return without_peft(self.accelerator.unwrap_model(model))

    def _attach(self, causal: Any, choose: Callable[[], Scorer]) -> TreeHead:
        return TreeHead(causal, choose, statistics=self.tree_statistics, autocast=self.accelerator.autocast)

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """As TRL's. Micro-batches that an interrupted run left waiting are no part of this one."""
        self._waiting.clear()
        return super().train(*args, **kwargs)  # type: ignore[misc]

    @property
    def step_report(self) -> StepReport | None:
        """What the policy's last step did."""
        return self.replay.report

    def _micro_batch(self, inputs: Any) -> MicroBatch:
        """The rows that the loss of `inputs` will score, exactly as it will ask for them."""
        raise NotImplementedError

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """TRL's loss; in training, that of all micro-batches of a step with the last, 0 with the others."""
        if not self.model.training or not torch.is_grad_enabled():
            return super().compute_loss(  # type: ignore[misc]
                model, inputs, return_outputs=return_outputs, num_items_in_batch=num_items_in_batch
            )
        self._waiting.append((inputs, self._micro_batch(inputs)))
        if not self.accelerator.sync_gradients:
            return torch.zeros((), device=self.accelerator.device, requires_grad=True)
        waiting, self._waiting = self._waiting, []
        batches = [batch for _, batch in waiting]
        output = model(**joined(batches), fused_lm_head=True)
        slices, loss = SliceModel(model, batches, output), None
        reference = self._reference_slices(batches)
        with self._reference_head.answering(reference):
            for held, _ in waiting:
                slices.advance()
                if reference is not None:
                    reference.advance()
                share = super().compute_loss(slices, held, num_items_in_batch=num_items_in_batch)  # type: ignore[misc]
                loss = share if loss is None else loss + share
        return loss

    def _reference_slices(self, batches: list[MicroBatch]) -> SliceModel | None:
        """The reference's joint forward, for trainers whose loss scores it."""
        del batches
        return None


def _tuner_layer(model: Any) -> BaseTunerLayer | None:
    """One of the layers that PEFT put its adapters into; they are switched together."""
    return next((module for module in model.modules() if isinstance(module, BaseTunerLayer)), None)


class TierGRPOTrainer(TreeTrainer, GRPOTrainer):
    """`trl.GRPOTrainer` over a store: `TierGRPOTrainer(..., store=store)`.

    Old and reference log-probabilities of a generation batch are scored as one tree too.
    """

    tree_statistics = ("entropy",)
    refused_options = (*ANYWHERE, *GRPO)

    def _micro_batch(self, inputs: Any) -> MicroBatch:
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
        mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
        labels = ids.masked_fill(mask == 0, IGNORED)
        labels[:, : -inputs["completion_ids"].shape[1]] = IGNORED
        return MicroBatch(ids, mask, labels)

    def _get_per_token_logps_and_entropies(
        self, model: Any, *args: Any, batch_size: int | None = None, **kwargs: Any
    ) -> Any:
        """As TRL, but in one call however many rows: the tree bounds its own memory."""
        del batch_size
        return super()._get_per_token_logps_and_entropies(model, *args, **kwargs)


class TierDPOTrainer(TreeTrainer, DPOTrainer):
    """`trl.DPOTrainer` over a store: `TierDPOTrainer(..., store=store)`.

    Chosen and rejected completions of a prompt are branches of it, and equal prompts of a step are one.
    """

    @property
    def tree_statistics(self) -> tuple[str, ...]:
        """Those of TRL's metrics, and what weighted preferences need."""
        return (*DPO_STATISTICS, "log_sum_sq_probs") if self.use_weighting else DPO_STATISTICS

    def _micro_batch(self, inputs: Any) -> MicroBatch:
        labels = inputs["input_ids"].masked_fill(inputs["completion_mask"] == 0, IGNORED)
        return MicroBatch(inputs["input_ids"], inputs["attention_mask"], labels)

    def _reference_slices(self, batches: list[MicroBatch]) -> SliceModel | None:
        if self.precompute_ref_logps:
            return None
        model = self.ref_model or self.model
        with torch.no_grad(), self._as_reference() if self.ref_model is None else nullcontext():
            output = model(**joined(batches), fused_lm_head=True)
        return SliceModel(model, batches, output)
