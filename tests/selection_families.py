"""Tiny models whose queries attend to the keys that an indexer selects: fields of `model_zoo.Family`, by name."""

from __future__ import annotations

from typing import Any

import torch
from latent_families import EXPERTS, LATENT

# Many heads: where every head's score is below zero the sum is zero, and among equal scores no order is right.
INDEX = {"index_topk": 5, "index_n_heads": 8, "index_head_dim": 8}


def _fp32(model: str, **fields: Any) -> dict[str, Any]:
    return {
        "model": model,
        "dtype": torch.float32,
        "fields": {**LATENT, **EXPERTS, **INDEX, "num_local_experts": 4, **fields},
    }


SELECTIONS: dict[str, dict[str, Any]] = {
    "deepseek_v32": _fp32("DeepseekV32"),
    "axk2": _fp32("AXK2", n_group=None, topk_group=None, gated_norm_rank=4),
    "glm_moe_dsa": _fp32("GlmMoeDsa", num_hidden_layers=3, indexer_types=["full", "shared", "full"]),
    "hy_v4": _fp32("HYV4", num_hidden_layers=3, indexer_types=["full", "shared", "full"], hc_mult=2),
}
