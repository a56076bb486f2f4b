"""A training step on an accelerator, dense against tiercache: time, peak device memory, stall, gradient error.

A model of random weights, so the times and bytes mean something and the tokens do not; gradients are compared in fp32
on a small model of the same class. Run by `device_check.py`; on a machine without an accelerator `--cpu` tries it.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

import tiercache
from tiercache.runtime import BranchReplay, Row


@dataclass(frozen=True)
class Size:
    """A model and a group of rows."""

    width: int
    layers: int
    heads: int
    kv_heads: int
    prompt: int
    tail: int
    branches: int
    dtype: torch.dtype


LARGE = Size(2048, 16, 32, 8, 16384, 512, 8, torch.bfloat16)
SMALL = Size(256, 4, 8, 2, 768, 48, 3, torch.float32)
# Device and host budgets: all pages on the device, pages that travel to host memory, and to disk as well.
BUDGETS = {"resident": ("6GiB", None), "host": ("1GiB", "6GiB"), "disk": ("512MiB", "1GiB")}
SMALL_BUDGETS = {"resident": ("64MiB", None), "host": ("1MiB", "16MiB"), "disk": ("1MiB", "2MiB")}


def make_model(size: Size, device: str) -> Any:
    """A Llama of this size with random weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32000, hidden_size=size.width, intermediate_size=4 * size.width, num_hidden_layers=size.layers,
        num_attention_heads=size.heads, num_key_value_heads=size.kv_heads, max_position_embeddings=65536,
        attn_implementation="sdpa",
    )  # fmt: skip
    return LlamaForCausalLM(config).to(device, size.dtype).train()


def make_rows(size: Size) -> list[Row]:
    """Rows over one random prompt, their tails scored."""
    generator = torch.Generator().manual_seed(1)
    prompt = torch.randint(32000, (size.prompt,), generator=generator)
    rows = []
    for _ in range(size.branches):
        tokens = torch.cat([prompt, torch.randint(32000, (size.tail,), generator=generator)])
        rows.append(Row(tokens, torch.arange(len(tokens)) >= size.prompt, 1.0 / (size.branches * size.tail)))
    return rows


def dense_step(model: Any, rows: list[Row]) -> None:
    """Ordinary training, a row at a time, only scored positions projected."""
    device = next(model.parameters()).device
    for row in rows:
        tokens = row.tokens.to(device)
        at = row.scored.nonzero()[:, 0].to(device)
        logits = model(tokens[None], logits_to_keep=at - 1, use_cache=False).logits[0].float()
        logps = torch.log_softmax(logits, -1).gather(-1, tokens[at][:, None])
        (-logps.sum() * row.data).backward()


def _timed(device: str, step: Callable[[], Any]) -> dict[str, float]:
    on_cuda = device == "cuda"
    if on_cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    begin = time.perf_counter()
    step()
    if on_cuda:
        torch.cuda.synchronize()
    seconds = time.perf_counter() - begin
    peak = torch.cuda.max_memory_allocated() - before if on_cuda else 0
    return {"seconds": seconds, "peak_device_bytes": float(peak)}


def _loss(logps: torch.Tensor, row: Row) -> torch.Tensor:
    return -logps.sum() * row.data


def _gradient(model: Any) -> torch.Tensor:
    taken = torch.cat([p.grad.double().cpu().flatten() for p in model.parameters()])
    model.zero_grad(set_to_none=True)
    return taken


def gradient_error(device: str, folder: Path) -> float:
    """Relative gradient error in fp32 on the small model, budgets so low that pages travel to every tier."""
    model, rows = make_model(SMALL, device), make_rows(SMALL)
    dense_step(model, rows)
    want = _gradient(model)
    device_budget, host_budget = SMALL_BUDGETS["disk"]
    with tiercache.open_store(
        device_budget, host=host_budget, disk=str(folder / "small"), disk_capacity="1GiB"
    ) as store:
        BranchReplay(model, store, max_node_tokens=200).backward(rows, _loss)
    return float((_gradient(model) - want).norm() / want.norm())


def replay_part(folder: Path, *, device: str = "cuda", size: Size = LARGE, pairs: int = 2) -> dict[str, Any]:
    """Dense and tiercache in turns, under each of the budgets."""
    result: dict[str, Any] = {"gradient_rel_l2_fp32": gradient_error(device, folder), "dense_2_rows": []}
    model, rows = make_model(size, device), make_rows(size)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    dense_step(model, rows[:1])  # compile and allocate what later steps do not repeat
    tails = size.branches * size.tail
    result["ideal"] = 3 * (size.branches * size.prompt + tails) / (4 * size.prompt + 3 * tails)
    for name, (device_budget, host_budget) in (BUDGETS if size is LARGE else SMALL_BUDGETS).items():
        disk = str(folder / name)
        with tiercache.open_store(device_budget, host=host_budget, disk=disk, disk_capacity="24GiB") as store:
            replay = BranchReplay(model, store)
            replay.backward(rows[:2], _loss)
            runs = []
            for _ in range(pairs):
                result["dense_2_rows"].append(_timed(device, lambda: dense_step(model, rows[:2])))
                ours = _timed(device, lambda replay=replay: replay.backward(rows, _loss))  # type: ignore[misc]
                assert replay.report is not None
                runs.append({**ours, "report": replay.report.as_dict()})
            result[name] = {"runs": runs, "store": store.stats().as_dict()}
    dense_s = median(run["seconds"] for run in result["dense_2_rows"]) * size.branches / 2
    for name in BUDGETS:
        speedup = dense_s / median(run["seconds"] for run in result[name]["runs"])
        result[name] |= {"speedup": speedup, "fraction_of_ideal": speedup / result["ideal"]}
    return result


def main() -> None:
    """Tries the part on its own."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cpu", action="store_true", help="the small size on the host")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        options = {"device": "cpu", "size": SMALL} if arguments.cpu else {}
        print(json.dumps(replay_part(Path(scratch), **options), indent=1))


if __name__ == "__main__":
    main()
