"""How a tiny model of one family is built."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, kw_only=True)
class Family:
    """How to build one tiny model.

    Attributes:
        model: prefix of the classes in transformers: `Llama` for LlamaConfig and LlamaForCausalLM.
        fields: configuration fields over `model_zoo.COMMON`.
        dtype: the widest dtype in which its modules compute.
        suffix: end of the model class's name.
    """

    model: str
    fields: dict[str, Any]
    dtype: torch.dtype
    suffix: str = "ForCausalLM"


def fp64(model: str, **fields: Any) -> Family:
    """A causal LM that computes in fp64."""
    return Family(model=model, fields=fields, dtype=torch.float64)


def fp32(model: str, **fields: Any) -> Family:
    """A causal LM parts of which compute in fp32 whatever the weights are."""
    return Family(model=model, fields=fields, dtype=torch.float32)
