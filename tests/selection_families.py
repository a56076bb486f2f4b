"""Tiny models whose queries attend to the keys that an indexer selects, by name."""

from __future__ import annotations

from typing import Any

from family import Family, fp32
from latent_families import EXPERTS, LATENT

# Many heads: where every head's score is below zero the sum is zero, and among equal scores no order is right.
INDEX = {"index_topk": 5, "index_n_heads": 16, "index_head_dim": 8}


def _selecting(model: str, **fields: Any) -> Family:
    return fp32(model, **{**LATENT, **EXPERTS, **INDEX, "num_local_experts": 4, **fields})


SELECTIONS: dict[str, Family] = {
    "deepseek_v32": _selecting("DeepseekV32"),
    "axk2": _selecting("AXK2", n_group=None, topk_group=None, gated_norm_rank=4),
    "glm_moe_dsa": _selecting("GlmMoeDsa", num_hidden_layers=3, indexer_types=["full", "shared", "full"]),
    "hy_v4": _selecting("HYV4", num_hidden_layers=3, indexer_types=["full", "shared", "full"], hc_mult=2),
}
