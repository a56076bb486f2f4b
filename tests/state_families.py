"""Tiny models whose layers carry a recurrent or convolution state, by name."""

from __future__ import annotations

from family import Family, fp32, fp64
from latent_families import EXPERTS, LATENT

MOE = {"num_experts_per_tok": 2, "output_router_logits": False}
DELTA = {
    "head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
SCAN = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 2, "mamba_d_state": 8, "mamba_chunk_size": 8}


STATES: dict[str, Family] = {
    "lfm2": fp64("Lfm2", layer_types=["conv", "full_attention"], block_auto_adjust_ff_dim=False),
    "qwen3_next": fp32(
        "Qwen3Next",
        **MOE,
        **DELTA,
        num_experts=4,
        moe_intermediate_size=24,
        shared_expert_intermediate_size=24,
    ),
    "qwen3_5": fp32("Qwen3_5", **DELTA),
    "olmo_hybrid": fp32("OlmoHybrid", **{**DELTA, "linear_num_key_heads": 4}),
    "kimi_linear": fp32(
        "KimiLinear",
        **LATENT,
        **EXPERTS,
        num_experts=4,
        layer_types=["linear_attention", "full_attention"],
        linear_num_heads=4,
        linear_head_dim=8,
    ),
    "falcon_h1": fp32("FalconH1", **{**SCAN, "mamba_n_heads": 4}, head_dim=8, mamba_d_ssm=32),
    "bamba": fp32("Bamba", **SCAN, attn_layer_indices=[1], mamba_expand=2),
    "granite_hybrid": fp32(
        "GraniteMoeHybrid",
        **SCAN,
        **MOE,
        layer_types=["mamba", "attention"],
        mamba_expand=2,
        num_local_experts=4,
        shared_intermediate_size=24,
    ),
    "nemotron_h": fp32(
        "NemotronH",
        layers_block_type=["mamba", "attention", "mlp"],
        num_hidden_layers=3,
        head_dim=8,
        mamba_num_heads=8,
        mamba_head_dim=8,
        n_groups=2,
        ssm_state_size=8,
        chunk_size=8,
    ),
    "mamba2": fp32("Mamba2", num_heads=8, head_dim=8, n_groups=2, state_size=8, expand=2, chunk_size=8),
    "zamba2": fp32(
        "Zamba2",
        num_hidden_layers=4,
        layers_block_type=["mamba", "hybrid", "mamba", "hybrid"],
        num_key_value_heads=4,
        num_mem_blocks=1,
        adapter_rank=4,
        use_mem_rope=True,
        n_mamba_heads=8,
        mamba_headdim=8,
        mamba_ngroups=2,
        mamba_d_state=8,
        mamba_expand=2,
        chunk_size=8,
    ),
    "mamba": fp32("Mamba", state_size=8),
    "falcon_mamba": fp32("FalconMamba", state_size=8),
    "jamba": fp32(
        "Jamba",
        **MOE,
        attn_layer_period=2,
        attn_layer_offset=1,
        expert_layer_period=2,
        expert_layer_offset=1,
        num_experts=4,
        mamba_d_state=8,
        mamba_dt_rank=4,
    ),
    "minimax": fp32(
        "MiniMax",
        **MOE,
        head_dim=8,
        layer_types=["linear_attention", "full_attention"],
        block_size=8,
        num_local_experts=4,
        sliding_window=None,
    ),
}
