"""Options of a trainer that a tree of rows cannot carry, refused by name."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tiercache.errors import ConfigError
from tiercache.store import TierStore

ANYWHERE = (
    ("deepspeed", "wraps the optimizer and shards parameters behind the model"),
    ("use_liger_kernel", "replaces the model's forward when training starts"),
    ("torch_compile", "compiles the forward that is replaced here"),
    ("activation_offloading", "moves activations on its own; the store does that here"),
)
GRPO = (
    ("use_vllm", "samples outside the model"),
    ("use_transformers_continuous_batching", "samples through a scheduler of its own"),
    ("use_adaptive_entropy", "needs the gradient of entropies"),
    ("entropy_coef", "needs the gradient of entropies"),
)
# arguments of a trainer's constructor -> where the trainer keeps them
CHANGE_PROMPT = {
    "tools": "tools",
    "rollout_func": "rollout_func",
    "environment_factory": "environment_factories",
}


def refuse(args: Any, options: Iterable[tuple[str, str]]) -> None:
    """Raises ConfigError, naming the option, for the first of `options` that is switched on."""
    for name, why in options:
        value = getattr(args, name, None)
        if value:
            raise ConfigError(f"{name}: {why}", got=value, remedy=f"leave {name} at its default")


def refuse_arguments(given: dict[str, Any]) -> None:
    """The same for arguments of a trainer's constructor, by name."""
    for name in CHANGE_PROMPT:
        if given.get(name):
            raise ConfigError(
                f"{name}: may change the prompt while a completion is sampled",
                got=given[name],
                remedy=f"leave {name} out, or train on finished transcripts with BranchReplay",
            )


def check_ours(store: Any, replay_options: dict[str, Any] | None, reference_prompts: Any) -> None:
    """Raises ConfigError, naming the argument, for one of ours that cannot be meant."""
    if not isinstance(store, TierStore):
        raise ConfigError("store", got=type(store).__name__, limit="a TierStore, from tiercache.open_store")
    if "temperature" in (replay_options or {}):
        raise ConfigError(
            "replay_options: temperature is the trainer's",
            got=(replay_options or {})["temperature"],
            remedy="set it in the trainer's config, where it has one",
        )
    whole = isinstance(reference_prompts, int) and not isinstance(reference_prompts, bool)
    if not (whole and reference_prompts >= 0):
        raise ConfigError("reference_prompts", got=repr(reference_prompts), limit="an integer of at least 0")


def refuse_model(trainer: Any) -> None:
    """The same for what only the built trainer knows: images, sharded parameters, auxiliary losses."""
    if trainer._is_vlm:  # noqa: SLF001 - the trainer's own mark of image inputs
        raise ConfigError(
            "processing_class: image inputs are not supported",
            got=type(trainer.processing_class).__name__,
            limit="a tokenizer",
        )
    if trainer.is_fsdp_enabled:
        raise ConfigError(
            "fsdp: parameters sharded by the trainer are not supported",
            remedy="use DDP, or tiercache.runtime.distributed in a loop of your own",
        )
    if trainer.aux_loss_enabled:
        raise ConfigError(
            "router_aux_loss_coef: auxiliary losses of experts are not supported",
            got=trainer.router_aux_loss_coef,
            limit=0.0,
        )
