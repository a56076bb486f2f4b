"""Tiny models with latent attention, by name."""

from __future__ import annotations

from typing import Any

from family import Family, fp32, fp64

LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 12,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 10,
}
EXPERTS: dict[str, Any] = {
    "moe_intermediate_size": 24,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
}

LATENTS: dict[str, Family] = {
    "deepseek_v2": fp32("DeepseekV2", **LATENT, **EXPERTS, topk_method="greedy"),
    "glm4_moe_lite": fp32("Glm4MoeLite", **LATENT, **EXPERTS),
    "minicpm3": fp64("MiniCPM3", **LATENT),
    "youtu": fp64("Youtu", **LATENT),
}
