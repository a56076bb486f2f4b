"""Tiny models with latent attention: fields of `model_zoo.Family`, by name."""

from __future__ import annotations

from typing import Any

import torch

LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 12,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 10,
}
EXPERTS = {
    "moe_intermediate_size": 24,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
}

LATENTS: dict[str, dict[str, Any]] = {
    "deepseek_v2": {
        "model": "DeepseekV2",
        "dtype": torch.float32,
        "fields": {**LATENT, **EXPERTS, "topk_method": "greedy"},
    },
    "glm4_moe_lite": {"model": "Glm4MoeLite", "dtype": torch.float32, "fields": {**LATENT, **EXPERTS}},
    "minicpm3": {"model": "MiniCPM3", "fields": LATENT},
    "youtu": {"model": "Youtu", "fields": LATENT},
}
