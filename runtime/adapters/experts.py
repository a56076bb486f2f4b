"""The routers of a Transformers model with a load-balancing loss of its own."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

from torch import nn


@dataclass(frozen=True, slots=True)
class Routers:
    """What a load-balancing loss is made of.

    Attributes:
        modules: routers, one a layer.
        index: place of the logits [T, E] among what a router returns.
        top_k: experts of a token.
        coefficient: of the loss, as the configuration has it.
    """

    modules: list[nn.Module]
    index: int
    top_k: int
    coefficient: float


def find_routers(causal: Any) -> Routers | None:
    """Of a causal LM that computes a load-balancing loss over whole routers; None of any other."""
    has_loss = hasattr(sys.modules[type(causal).__module__], "load_balancing_loss_func")
    recorder = (getattr(causal, "_can_record_outputs", None) or {}).get("router_logits")
    if not has_loss or recorder is None or getattr(recorder, "layer_name", None) is not None:
        return None
    kind = getattr(recorder, "target_class", recorder)
    modules = [module for module in causal.modules() if isinstance(module, kind)]
    fields = ("num_experts_per_tok", "router_aux_loss_coef")
    if not modules or not all(hasattr(causal, name) for name in fields):
        return None
    top_k, coefficient = (getattr(causal, name) for name in fields)
    return Routers(modules, getattr(recorder, "index", 0), int(top_k), float(coefficient))


def run_experts_one_by_one(model: nn.Module) -> None:
    """Switches a Transformers model off the grouped product of experts, which has no fp64."""
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        if hasattr(config, "_experts_implementation"):
            config._experts_implementation = "eager"  # noqa: SLF001
