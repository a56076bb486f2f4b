"""The replay benchmark on families of another kind: random weights, about 100M parameters, pages measured as well."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from jobs import Goals, run_job
from replay_plan import DENSE_ROWS, Job
from replay_workload import Shape

from tiercache import open_store
from tiercache.runtime import BranchReplay

SIDE = Path(__file__).with_name("replay_side.py")
FAMILY_SHAPE = Shape(prompt=2048, tail=64, branches=8)
_COMMON: dict[str, Any] = {
    "vocab_size": 8192,
    "hidden_size": 640,
    "intermediate_size": 2048,
    "num_hidden_layers": 16,
    "num_attention_heads": 10,
    "tie_word_embeddings": True,
    "max_position_embeddings": 8192,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "lfm2": (
        "Lfm2",
        {
            "num_key_value_heads": 5,
            "block_auto_adjust_ff_dim": False,
            "layer_types": ["conv", "conv", "conv", "full_attention"] * 4,
        },
    ),
    "qwen3_5": (
        "Qwen3_5",
        {
            "num_key_value_heads": 5,
            "head_dim": 64,
            "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"] * 4,
            "linear_num_key_heads": 5,
            "linear_num_value_heads": 10,
            "linear_key_head_dim": 64,
            "linear_value_head_dim": 64,
        },
    ),
    "youtu": (
        "Youtu",
        {
            "num_key_value_heads": 10,
            "q_lora_rank": 320,
            "kv_lora_rank": 128,
            "qk_rope_head_dim": 32,
            "qk_nope_head_dim": 64,
            "v_head_dim": 64,
        },
    ),
}


def family_goals(names: list[str]) -> Goals:
    """Of the fields of these families."""
    return {f"{name}_fraction_of_ideal": (">=", 0.75) for name in names}


def run_families(names: list[str], *, quick: bool, tiny: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """Fields and runs of each family: dense training and tiercache take turns."""
    shape = replace(FAMILY_SHAPE, prompt=64, tail=8) if tiny else FAMILY_SHAPE
    fields: dict[str, Any] = {}
    results: dict[str, list[dict[str, Any]]] = {}
    for name in names:
        with tempfile.TemporaryDirectory(prefix="tiercache-bench-") as scratch:
            pages = _prepare(Path(scratch), name, tiny=tiny)
            jobs = [
                Job(f"{name}_dense", "dense", (name,), {"rows": DENSE_ROWS}),
                Job(f"{name}_tiercache", "tiercache", (name,), {}),
            ]
            for job in jobs * (1 if quick else 3):
                found = run_job(SIDE, job.name, job.as_dict({name: shape}), Path(scratch))
                results.setdefault(job.name, []).append(found)
        found_fields = _fields(shape, pages, results[f"{name}_dense"], results[f"{name}_tiercache"])
        fields |= {f"{name}_{field}": value for field, value in found_fields.items()}
    return fields, results


def _prepare(folder: Path, name: str, *, tiny: bool) -> dict[str, int]:
    """Leaves the model's weights and the text's bytes as tokens in `folder`; returns sizes of its pages."""
    from pydoc_data.topics import topics

    import transformers

    transformers.utils.logging.disable_progress_bar()
    family, own = FAMILIES[name]
    fields = {**_COMMON, **own, **({"num_hidden_layers": 4, "vocab_size": 256} if tiny else {})}
    if "layer_types" in fields:
        fields["layer_types"] = fields["layer_types"][: fields["num_hidden_layers"]]
    text_config = getattr(transformers, f"{family}TextConfig", None) or getattr(
        transformers, f"{family}Config"
    )
    torch.manual_seed(3)
    model = getattr(transformers, f"{family}ForCausalLM")(text_config(**fields)).bfloat16()
    model.save_pretrained(folder / "model")
    text = "\n\n".join(topics[key] for key in sorted(topics))
    torch.save(torch.tensor(list(text.encode()), dtype=torch.int64), folder / "tokens.pt")
    with open_store(device="64MiB") as store:
        sizes = BranchReplay(model, store, check_model=False).engine.page_sizes()
    layers = fields["num_hidden_layers"]
    attending = fields.get("layer_types", ["full_attention"] * layers).count("full_attention")
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "page_bytes_per_token": sizes["prefix_bytes_per_token"],
        "full_attention_bytes_per_token": sizes["expanded_bytes_per_token"] // attending * layers,
        "state_bytes": sizes["state_bytes"],
    }


def _fields(
    shape: Shape, pages: dict[str, int], dense: list[dict[str, Any]], ours: list[dict[str, Any]]
) -> dict[str, Any]:
    dense_s = median(run["seconds"] for result in dense for run in result["runs"])
    dense_s *= shape.branches / DENSE_ROWS
    ours_s = median(run["seconds"] for result in ours for run in result["runs"])
    num_nodes = ours[0]["runs"][0]["report"]["num_nodes"]
    per_token = pages["page_bytes_per_token"] + pages["state_bytes"] * num_nodes / shape.prompt
    return {
        **pages,
        "dense_s": dense_s,
        "tiercache_s": ours_s,
        "fraction_of_ideal": dense_s / ours_s / shape.ideal,
        "bytes_per_prefix_token": per_token,
        "bytes_over_full_attention": per_token / pages["full_attention_bytes_per_token"],
    }
