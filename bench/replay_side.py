"""One contender's run in a process of its own: `python bench/replay_side.py JOB.json`; leaves JOB.out.json."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from jobs import serve_job
from replay_contenders import CONTENDERS, dense
from replay_workload import BenchRow, Shape, load_weights, make_rows

from tiercache.cli.peak_memory import PeakMemory


def allocate_gradients(model: torch.nn.Module) -> None:
    """Zero gradients whose memory is really there before the step."""
    for parameter in model.parameters():
        if parameter.grad is None:
            parameter.grad = torch.empty_like(parameter)
        parameter.grad.fill_(0)


def shortened(rows: list[BenchRow]) -> list[BenchRow]:
    """Two short rows of the same kind, to compile and allocate what a step does not repeat."""
    short = []
    for row in rows[:2]:
        tokens = torch.cat([row.tokens[:320], row.tokens[-8:]])  # long enough to share a node
        short.append(BenchRow(tokens, torch.arange(len(tokens)) >= len(tokens) - 8, 16))
    return short


def write_gradient(model: torch.nn.Module, path: Path) -> None:
    """All gradients as one run of fp32 numbers."""
    with path.open("wb") as file:
        for parameter in model.parameters():
            parameter.grad.float().numpy().tofile(file)


def check_contender(name: str, folder: Path) -> float:
    """Relative gradient error of a contender against dense training, in fp32 on a small random model."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2,
    )  # fmt: skip
    model = LlamaForCausalLM(config).train()
    prompt = torch.randint(128, (320,))  # long enough to be a node of the tree
    rows = []
    for length in (7, 16, 3):
        tokens = torch.cat([prompt, torch.randint(128, (length,))])
        rows.append(BenchRow(tokens, torch.arange(len(tokens)) >= len(prompt), 26))
    gradients = []
    for make in (dense, CONTENDERS[name]):
        model.zero_grad(set_to_none=True)
        make(model, folder)(rows)
        gradients.append(torch.cat([p.grad.double().flatten() for p in model.parameters()]))
    return float((gradients[1] - gradients[0]).norm() / gradients[0].norm())


def run(job: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Carries out one job.

    Args:
        job: contender, shape (one, or two that take turns `repeats` times), dtype, rows (how many to run; all by
            default), gradient (files to write that of each shape to, without their number), options (of the
            contender), check.
        folder: with the model and the text.
    """
    result: dict[str, Any] = {}
    if job.get("check"):
        result["check"] = check_contender(job["contender"], folder)
        if not result["check"] <= 1e-5:
            raise SystemExit(f"{job['contender']}: gradient off by {result['check']:.1e} on a small model")
    torch.set_grad_enabled(True)
    model = load_weights(folder, getattr(torch, job["dtype"]))
    shapes = [Shape(**shape) for shape in job["shapes"]]
    groups = [make_rows(folder, shape)[: job.get("rows")] for shape in shapes]
    step = CONTENDERS[job["contender"]](model, folder, **job.get("options", {}))
    step(shortened(groups[0]))
    result["runs"] = []
    for turn in range(job.get("repeats", 1)):
        for index in range(len(groups)) if turn % 2 == 0 else reversed(range(len(groups))):
            allocate_gradients(model)
            with PeakMemory() as memory:
                found = step(groups[index])
            result["runs"].append(
                {"shape": index, "seconds": memory.seconds, "peak_bytes": memory.peak_bytes, **found}
            )
            if job.get("gradient"):
                write_gradient(model, folder / f"{job['gradient']}.{index}")
    return result


if __name__ == "__main__":
    serve_job(run)
