"""A tiny Llama whose linear layers are quantised to 4 bits, under LoRA adapters that do something."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model


def load_quantised(folder: Path, **fields: Any) -> Any:
    """The model in `folder` in 4-bit NormalFloat, computing in fp32 unless told otherwise; frozen."""
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    config = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32, **fields
    )
    model = AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=config, device_map="cpu", dtype=torch.float32, attn_implementation="eager"
    )
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            # Where processors have AVX512-BF16, layers repack themselves at the first forward in evaluation mode,
            # as in sampling, and train no more, under TRL's trainers too.
            module.support_avx512bf16_for_cpu = False
    return model.requires_grad_(requires_grad=False).train()


def adapted(model: Any) -> Any:
    """The model with adapters, the same ones each time."""
    torch.manual_seed(3)
    lora = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    return get_peft_model(model, lora)
