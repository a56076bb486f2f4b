"""Tiny random models of every family that the tests name, built from configurations in memory.

Weights are drawn from a fixed seed at a scale that makes attention patterns sharp and every parameter
matter, so that a lost page or a wrong position shows as an error of per cents, not of the last digits.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from family import Family, fp32, fp64
from latent_families import EXPERTS, LATENT, LATENTS
from selection_families import SELECTIONS
from state_families import DELTA, MOE, STATES

VOCAB = 61
WINDOW = 6

COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
    "tie_word_embeddings": False,
}
ALTERNATING = ["sliding_attention", "full_attention"]
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


FAMILIES: dict[str, Family] = {
    "llama": fp64("Llama"),
    "qwen2": fp64("Qwen2"),
    "qwen3": fp64("Qwen3", head_dim=8),
    "mistral": fp64("Mistral", sliding_window=WINDOW),
    "starcoder2": fp64("Starcoder2", sliding_window=WINDOW, use_bias=True),
    "gemma2": fp64(
        "Gemma2",
        head_dim=8,
        query_pre_attn_scalar=8,
        sliding_window=WINDOW,
        attn_logit_softcapping=5.0,
        final_logit_softcapping=6.0,
        tie_word_embeddings=True,
    ),
    "gemma3": fp64(
        "Gemma3",
        head_dim=8,
        query_pre_attn_scalar=8,
        sliding_window=WINDOW,
        layer_types=ALTERNATING,
        tie_word_embeddings=True,
    ),
    "phi": fp64(
        "Phi", rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
    ),
    "phi3": fp64("Phi3"),
    "gpt_neox": fp64("GPTNeoX", hidden_dropout=0.0, attention_dropout=0.0),
    "olmo2": fp64("Olmo2"),
    "granite": fp64(
        "Granite",
        embedding_multiplier=2.0,
        logits_scaling=3.0,
        residual_multiplier=0.7,
        attention_multiplier=0.4,
    ),
    "cohere": fp64("Cohere", logit_scale=0.6, tie_word_embeddings=True),
    "smollm3": fp64("SmolLM3", no_rope_layers=[1, 0], tie_word_embeddings=True),
    "glm4": fp64("Glm4", head_dim=8),
    "gpt_oss": fp32(
        "GptOss",
        **MOE,
        head_dim=8,
        num_local_experts=4,
        sliding_window=WINDOW,
        layer_types=ALTERNATING,
        rope_parameters={**YARN, "rope_theta": 1e4},
    ),
    "mixtral": fp32("Mixtral", **MOE, num_local_experts=4, sliding_window=None),
    "qwen3_moe": fp32("Qwen3Moe", **MOE, head_dim=8, num_experts=4, moe_intermediate_size=24),
    "deepseek_v3": fp32("DeepseekV3", **LATENT, **EXPERTS, num_mtp_layers=0),
}

LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0] * 4,
    "long_factor": [2.0, 3.0, 4.0, 5.0],
    "original_max_position_embeddings": 64,
    "factor": 4.0,
}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}

REFUSED: dict[str, Family] = {
    "bloom": fp64("Bloom", n_layer=2, n_head=4, hidden_dropout=0.0, attention_dropout=0.0),
    "mpt": fp64("Mpt", d_model=32, n_heads=4, n_layers=2, max_seq_len=256),
    "falcon": fp64("Falcon", hidden_dropout=0.0, attention_dropout=0.0, new_decoder_architecture=False),
    "opt": fp64("OPT", ffn_dim=48, word_embed_proj_dim=32, dropout=0.0, attention_dropout=0.0),
    "longrope": fp64("Phi3", original_max_position_embeddings=64, rope_parameters=LONGROPE),
    "dynamic": fp64("Llama", rope_parameters=DYNAMIC, max_position_embeddings=64),
    "dropout": fp64("Llama", attention_dropout=0.1),
    "hidden_dropout": fp64("GPTNeoX", hidden_dropout=0.1, attention_dropout=0.0),
    "cross_attention": Family(
        model="GPT2",
        suffix="LMHeadModel",
        dtype=torch.float64,
        fields={
            "n_embd": 32,
            "n_layer": 2,
            "n_head": 4,
            "n_positions": 256,
            "add_cross_attention": True,
            "is_decoder": True,
            "resid_pdrop": 0.0,
            "embd_pdrop": 0.0,
            "attn_pdrop": 0.0,
        },
    ),
    "shared_kv": fp64(
        "Gemma3n",
        num_hidden_layers=4,
        head_dim=8,
        sliding_window=WINDOW,
        layer_types=ALTERNATING * 2,
        num_kv_shared_layers=2,
        hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=VOCAB,
        intermediate_size=[48] * 4,
        activation_sparsity_pattern=[0.0] * 4,
        laurel_rank=4,
        pad_token_id=0,
    ),
    "chunked": fp32(
        "Llama4",
        head_dim=8,
        intermediate_size_mlp=48,
        num_local_experts=2,
        num_experts_per_tok=1,
        attention_chunk_size=64,
        no_rope_layers=[1, 0],
        layer_types=["chunked_attention", "full_attention"],
        moe_layers=[],
    ),
    "pooled": fp32(
        "Qwen4Exp",
        **MOE,
        **DELTA,
        num_experts=4,
        indexer_n_heads=2,
        indexer_kv_heads=1,
        indexer_head_dim=8,
        indexer_budget=8,
        indexer_compress_ratio=4,
    ),
    "zamba": fp32(
        "Zamba",
        layers_block_type=["mamba", "hybrid"],
        num_key_value_heads=4,
        n_mamba_heads=2,
        mamba_d_state=8,
        mamba_dt_rank=4,
    ),
}


def _classes(family: Family) -> tuple[Any, Any]:
    import transformers  # imported here: only tests of families pay its import

    # of multimodal families, the part that reads text
    text = ("Gemma3", "Gemma3n", "Llama4", "Qwen3_5", "Qwen4Exp")
    name = f"{family.model}Text" if family.model in text else family.model
    return getattr(transformers, f"{name}Config"), getattr(transformers, f"{family.model}{family.suffix}")


def build(name: str, *, dtype: torch.dtype | None = None, seed: int = 0, **fields: Any) -> Any:
    """A tiny model of family `name` in `dtype` (its widest by default), in training mode."""
    family = {**FAMILIES, **LATENTS, **SELECTIONS, **STATES, **REFUSED}[name]
    config_class, model_class = _classes(family)
    config = config_class(**{**COMMON, **family.fields, **fields})
    config._attn_implementation = "eager"
    with seeded(seed):
        model = model_class(config)
    randomise(model, seed)
    return model.to(dtype or family.dtype).train()


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Torch's own generator at a fixed state, put back afterwards."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


def randomise(model: torch.nn.Module, seed: int) -> None:
    """Draws every parameter anew: matrices at unit gain, vectors around where they were."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim >= 2:
                parameter.copy_(noise * 1.2 / parameter.shape[-1] ** 0.5)
            else:
                parameter.add_(0.2 * noise)
