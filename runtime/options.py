"""Options of a replay, validated once."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tiercache.errors import ConfigError
from tiercache.profile import Profile

PrefixGradient = Literal["exact", "detached"] | int
KeptActivations = Literal["layer_inputs", "recompute", "attention", "all"]
KEPT_ACTIVATIONS: tuple[KeptActivations, ...] = ("layer_inputs", "recompute", "attention", "all")
PrefixActivations = KeptActivations | Literal["auto"]
PREFIX_ACTIVATIONS = (*KEPT_ACTIVATIONS, "auto")

DEFAULT_MIN_SHARED_TOKENS = 256
DEFAULT_HEAD_BYTES = 48 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplayOptions:
    """Options of `BranchReplay`.

    Attributes:
        prefix_gradient: "exact", "detached" (ancestors' pages and boundary states are constants; shared
            scored tokens still get their own terms), or a window w: keys and values more than w tokens before
            the nearest branch are constants for every later node.
        prefix_activations: what capture leaves in the store for pop: "layer_inputs", nothing ("recompute"),
            layer inputs and each layer's attention output and log-sum-exp ("attention"), all that backward needs,
            so that pop runs no second forward ("all"), or for each node what its price at measured speeds and the
            store's budgets say ("auto").
        profile: speeds that "auto" goes by, or a file of them from `tiercache profile`; measured in a second by
            default.
        max_node_tokens: longest node; from the device budget by default.
        max_visit_tokens: most tail tokens replayed together, and the longest tail.
        max_visit_bytes: the same as a bound of a visit's activations; 1.5 times the device budget by default.
        min_shared_tokens: a run shared by two branches becomes a node from this length on; by more branches,
            sooner.
        head_bytes: bound of the logits held at once.
        sum_in_fp32: sum bf16 and fp16 parameter gradients in fp32 during a step.
        temperature: logits are divided by it, in every log-probability.
        share_dropout: the rows of a shared prefix may share their dropout masks.
        check_model: prove at construction that the model carries its prefix through the attention function.
        debug: compare recomputed pages with captured ones, bit for bit.
        auxiliary_loss: the experts' load-balancing loss is part of the loss: `backward` adds it with the model's own
            coefficient, after `logprobs` it is `BranchReplay.auxiliary_loss`. One more forward a branch in `backward`.
    """

    prefix_gradient: PrefixGradient = "exact"
    prefix_activations: PrefixActivations = "layer_inputs"
    profile: Profile | str | Path | None = None
    max_node_tokens: int | None = None
    max_visit_tokens: int | None = None
    max_visit_bytes: int | None = None
    min_shared_tokens: int = DEFAULT_MIN_SHARED_TOKENS
    head_bytes: int = DEFAULT_HEAD_BYTES
    sum_in_fp32: bool = True
    temperature: float = 1.0
    share_dropout: bool = False
    check_model: bool = True
    debug: bool = False
    auxiliary_loss: bool = False

    def __post_init__(self) -> None:
        gradient = self.prefix_gradient
        is_window = isinstance(gradient, int) and not isinstance(gradient, bool) and gradient >= 0
        if gradient not in ("exact", "detached") and not is_window:
            raise ConfigError(
                "prefix_gradient",
                got=repr(gradient),
                limit='"exact", "detached" or a window of at least 0 tokens',
            )
        if self.prefix_activations not in PREFIX_ACTIVATIONS:
            raise ConfigError(
                "prefix_activations", got=repr(self.prefix_activations), limit=" | ".join(PREFIX_ACTIVATIONS)
            )
        if self.profile is not None and self.prefix_activations != "auto":
            raise ConfigError(
                "profile: has no effect",
                got=f"prefix_activations={self.prefix_activations!r}",
                remedy='leave it out, or choose prefix_activations="auto"',
            )
        if not (isinstance(self.temperature, int | float) and 0 < self.temperature < float("inf")):
            raise ConfigError("temperature", got=repr(self.temperature), limit="a finite number above 0")
        for name in (
            "max_node_tokens",
            "max_visit_tokens",
            "max_visit_bytes",
            "min_shared_tokens",
            "head_bytes",
        ):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise ConfigError(name, got=repr(value), limit="an integer of at least 1")
        if self.max_visit_tokens is not None and self.max_visit_bytes is not None:
            raise ConfigError("max_visit_tokens and max_visit_bytes", got="both", limit="one of them")

        if self.auxiliary_loss and gradient != "exact":
            raise ConfigError(
                "auxiliary_loss with a prefix that is constant",
                got=f"prefix_gradient={gradient!r}",
                limit='"exact"',
                remedy="every token's router takes part in it",
            )

    @property
    def window(self) -> int | None:
        """Tokens before the nearest branch that keep their gradient; None when all do."""
        if self.prefix_gradient == "exact":
            return None
        return 0 if self.prefix_gradient == "detached" else int(self.prefix_gradient)
