"""Causal language models and texts that commands run on."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from tiercache.errors import ConfigError

if TYPE_CHECKING:
    from tiercache.runtime.adapters import ModelAdapter


def load_causal_lm(model: str | None, gguf: str | None, dtype: torch.dtype | None) -> Any:
    """A model by its path, its id, or its GGUF file.

    Args:
        model: folder or id that Transformers knows, or None.
        gguf: file with the weights, or None.
        dtype: of the weights; the checkpoint's own (bf16 for GGUF, whose own don't train) by default.

    Raises:
        ConfigError: neither or both were named, or it can't be loaded.
    """
    import transformers

    if (model is None) == (gguf is None):
        raise ConfigError("model to load", got="none or two", limit="--model or --gguf")
    try:
        if gguf is None:
            return transformers.AutoModelForCausalLM.from_pretrained(model, dtype=dtype or "auto")
        path = Path(gguf)
        return transformers.AutoModelForCausalLM.from_pretrained(
            path.parent,
            gguf_file=path.name,
            quantization_config=transformers.GgufConfig(dequantize=True),  # packed weights would not train
            dtype=dtype or torch.bfloat16,
        )
    except (OSError, ValueError) as error:
        raise ConfigError(f"model {model or gguf}: {error}") from error


def text_tokens(model: str | None, gguf: str | None, num_tokens: int) -> torch.Tensor | None:
    """[num_tokens] int64 of English prose in the model's own tokens; None when it comes without a tokenizer."""
    from pydoc_data.topics import topics

    import transformers

    try:
        if gguf is None:
            tokenizer = transformers.AutoTokenizer.from_pretrained(model)
        else:
            tokenizer = transformers.AutoTokenizer.from_pretrained(
                Path(gguf).parent, gguf_file=Path(gguf).name
            )
    except (OSError, ValueError, KeyError):
        return None
    # no tokenizer makes fewer tokens than one for 16 characters of prose; all of the text would take seconds
    prose = "\n\n".join(topics[name] for name in sorted(topics))[: 16 * num_tokens]
    ids = tokenizer(prose, add_special_tokens=False, verbose=False)["input_ids"][:num_tokens]
    return torch.tensor(ids, dtype=torch.int64)


def twin_of_configuration(model: str) -> ModelAdapter | None:
    """A tiny model with random weights of the class that a folder without weights names; None for any other model.

    Raises:
        ConfigError: the configuration is of no causal language model.
        ModelRefusedError: no small model of its class can be built.
    """
    folder = Path(model)
    if not (folder / "config.json").is_file() or any(
        path.suffix in (".safetensors", ".bin") for path in folder.iterdir()
    ):
        return None
    from tiercache.runtime.adapters import create_adapter
    from tiercache.runtime.planning.model import build_model, load_config

    with torch.device("meta"):
        whole = build_model(load_config(folder), torch.float32)
    return create_adapter(whole).twin()
