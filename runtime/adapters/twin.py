"""Tiny twins of Transformers models: the same class, every limit on length shrunk, a few layers of each kind.

A window, a chunk or a rotary table that changes with length goes wrong only in rows longer than it. The
user's model may have limits of many thousand tokens; its twin has them at sixteen, so that a row of a few
dozen tokens crosses each.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from tiercache.errors import ModelRefusedError

LIMIT = 16  # tokens; what every length that the configuration names becomes
_VOCAB = 128
_MOST_LAYERS = 8
_MOST_PARAMETERS = 200_000_000
_LENGTHS = (
    "sliding_window",
    "attention_chunk_size",
    "original_max_position_embeddings",
    "local_window_size",
    "index_topk",
)
_HEADS = ("num_attention_heads", "n_head", "n_heads")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads")
_WIDTHS = ("hidden_size", "n_embd", "d_model")
_SMALL = {
    "intermediate_size": 64,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "intermediate_size_mlp": 64,
    "ffn_dim": 64,
    "n_inner": 64,
}
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers")
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")


def build_twin(model: Any) -> Any:
    """A small model of `model`'s class in fp32 on the CPU, with random weights, in evaluation mode.

    Raises:
        ModelRefusedError: the class can't be built from a shrunk configuration.
    """
    failures = []
    for shrink in (_shrink_all, _shrink_depth):
        config = copy.deepcopy(model.config)
        try:
            shrink(config.get_text_config())
            config._attn_implementation = "eager"  # noqa: SLF001
            with torch.random.fork_rng(devices=[]):
                torch.default_generator.manual_seed(0)
                _refuse_large(type(model), config)
                twin = type(model)(config).float().eval()
                _redraw(twin)
                _refuse_unfit(twin)
        except Exception as error:  # any constructor may refuse any field: the next shape is tried
            failures.append(f"{type(error).__name__}: {error}")
        else:
            return twin
    raise ModelRefusedError(
        f"{type(model).__name__}: no small model of its class could be built to prove it on",
        got="; ".join(failures),
        remedy="pass check_model=False if its attention is known to go through Transformers' interface",
    )


def _refuse_large(model_class: Any, config: Any) -> None:
    """Counts parameters before they exist: what was not shrunk may be as large as the user's model."""
    with torch.device("meta"):
        size = sum(p.numel() for p in model_class(config).parameters())
    if size > _MOST_PARAMETERS:
        raise ValueError(f"it would still have {size} parameters")


def _refuse_unfit(twin: Any) -> None:
    """A constructor may take widths that its forward does not: one that was shrunk, one that hangs on it."""
    with torch.no_grad():
        twin(input_ids=torch.arange(LIMIT)[None] % _VOCAB, use_cache=False)


def named_lengths(config: Any) -> dict[str, int]:
    """Every limit on length that a configuration names, with its value."""
    found = {}
    config = config.get_text_config()
    for place, fields in _tables(config):
        for name in _LENGTHS:
            value = fields.get(name)
            if isinstance(value, int) and value > 0:
                found[f"{place}{name}"] = value
    if _rope_types(config) & {"dynamic", "longrope"}:
        found["max_position_embeddings"] = config.max_position_embeddings
    return found


def _tables(config: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """The configuration's own fields, then its rotary tables, as dictionaries that can be written to."""
    yield "", config.__dict__
    rope = getattr(config, "rope_parameters", None)
    if isinstance(rope, dict):
        yield "rope_parameters.", rope
        for kind, fields in rope.items():
            if isinstance(fields, dict):
                yield f"rope_parameters.{kind}.", fields


def _rope_types(config: Any) -> set[str]:
    return {str(fields["rope_type"]) for _, fields in _tables(config) if "rope_type" in fields}


def _shrink_lengths(config: Any) -> None:
    for _, fields in _tables(config):
        for name in _LENGTHS:
            if isinstance(fields.get(name), int) and fields[name] > 0:
                fields[name] = LIMIT
    if getattr(config, "rope_parameters", None) and hasattr(config, "max_position_embeddings"):
        config.max_position_embeddings = LIMIT


def _shrink_depth(config: Any) -> None:
    """Layers, vocabulary and lengths only: widths stay, for classes whose widths depend on each other."""
    _shrink_lengths(config)
    name = next((n for n in _LAYERS if n in config.__dict__), None)
    if name is not None:
        _keep_layers(config, name, config.__dict__[name])
    config.vocab_size = _VOCAB
    for field in ("pad_token_id", "bos_token_id", "eos_token_id"):
        setattr(config, field, None)
    if getattr(config, "vocab_size_per_layer_input", None):
        config.vocab_size_per_layer_input = _VOCAB


def _keep_layers(config: Any, name: str, depth: int) -> None:
    """Keeps the first layer of each kind, at least two, where per-layer lists tell the kinds apart."""
    lists = {k: v for k, v in config.__dict__.items() if isinstance(v, list | tuple) and len(v) == depth}
    dense = getattr(config, "first_k_dense_replace", None)
    kept: list[int] = []
    kinds = set()
    for layer in range(depth):
        kind = (*(str(v[layer]) for v in lists.values()), dense is not None and layer < dense)
        if kind not in kinds and len(kept) < _MOST_LAYERS:
            kinds.add(kind)
            kept.append(layer)
    kept = sorted({*kept, *range(min(2, depth))})
    for key, values in lists.items():
        setattr(config, key, [values[layer] for layer in kept])
    if dense is not None:
        config.first_k_dense_replace = sum(layer < dense for layer in kept)
    setattr(config, name, len(kept))


def _shrink_all(config: Any) -> None:
    _shrink_depth(config)
    fields = config.__dict__
    heads, kv_heads = _first(fields, _HEADS), _first(fields, _KV_HEADS)
    width = _first(fields, _WIDTHS)
    if heads is not None and width is not None:
        head_dim = fields.get("head_dim") or fields[width] // fields[heads]
        group = fields[heads] // (fields[kv_heads] or fields[heads]) if kv_heads is not None else 1
        fields[heads] = 2 * min(group, 2)
        if kv_heads is not None and fields[kv_heads] is not None:
            fields[kv_heads] = fields[heads] // min(group, 2)
        fields[width] = fields[heads] * head_dim
    for name, most in _SMALL.items():
        if isinstance(fields.get(name), int):
            fields[name] = min(fields[name], most)
    for name in _EXPERTS:
        if isinstance(fields.get(name), int):
            used = fields.get("num_experts_per_tok") or 1
            groups = fields.get("n_group") or 1
            fields[name] = min(fields[name], groups * max(2, used))


def _first(fields: dict[str, Any], names: tuple[str, ...]) -> str | None:
    return next((name for name in names if name in fields), None)


def _redraw(model: nn.Module) -> None:
    """Unit-gain weights: at a constructor's small ones attention is nearly flat, and hides what it reads."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.normal_(std=parameter.shape[-1] ** -0.5)
            else:
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
