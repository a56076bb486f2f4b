"""One side of the demo, in a process of its own: `python -m tiercache.cli.demo.side dense|tiercache FOLDER`.

Reads FOLDER/settings.json. Says on stdout what it does, one JSON object a line: {"done": rows, "total":
rows}, or {"error": name of a class of tiercache.errors, "message": text}. Leaves SIDE.json with what was
measured, SIDE.gradient (fp32, all trainable parameters in their order) and SIDE.logps (fp32, [rows, tail]).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tiercache.cli.demo.settings import DemoSettings
from tiercache.cli.demo.workload import Branch, grpo_loss, load_model, make_branches
from tiercache.cli.peak_memory import PeakMemory
from tiercache.errors import TierCacheError

LossFn = Callable[[torch.Tensor, Branch], torch.Tensor]
Step = Callable[[list[Branch], LossFn], Any]


def say(**event: object) -> None:
    """One line for the process that draws the progress bar."""
    sys.stdout.write(json.dumps(event) + "\n")
    sys.stdout.flush()


def dense_step(model: Any) -> Step:
    """Ordinary training, one row at a time; only scored positions reach the vocabulary."""

    def step(branches: list[Branch], loss_fn: LossFn) -> None:
        for branch in branches:
            tokens = branch.tokens.to(model.device)
            positions = branch.scored.nonzero().squeeze(1).to(model.device)
            output = model(tokens[None], logits_to_keep=positions - 1, use_cache=False)
            scores = torch.log_softmax(output.logits[0].float(), dim=-1)
            scored = scores.gather(1, tokens[positions, None]).squeeze(1)
            logps = scored.new_zeros(len(tokens)).index_put((positions,), scored)
            torch.autograd.backward(loss_fn(logps, branch))

    return step


def open_demo_store(settings: DemoSettings) -> Any:
    """The store that the options ask for."""
    import tiercache

    return tiercache.open_store(
        device=settings.device_budget,
        host=settings.host_budget,
        disk=settings.disk,
        disk_capacity=settings.disk_capacity,
    )


def replay_step(model: Any, store: Any) -> Step:
    """The same step through the store."""
    from tiercache.runtime import BranchReplay

    replay: Any = BranchReplay(model, store)
    step: Step = replay.backward
    return step


def allocate_gradients(model: torch.nn.Module) -> None:
    """Zero gradients whose memory is really there before the step is measured."""
    for parameter in model.parameters():
        if parameter.requires_grad:
            if parameter.grad is None:
                parameter.grad = torch.empty_like(parameter)
            parameter.grad.fill_(0)


def warm_up(step: Step, branches: list[Branch]) -> None:
    """A step on short rows: what is compiled or allocated once is not a step's cost."""
    prompt = branches[0].tokens[~branches[0].scored]
    short = [
        Branch(
            tokens=torch.cat([prompt[:320], branch.tokens[-4:]]),  # long enough to share a node
            scored=torch.arange(min(len(prompt), 320) + 4) >= min(len(prompt), 320),
            advantage=0.0,
            num_scored=1,
        )
        for branch in branches[:2]
    ]
    step(short, grpo_loss)


@dataclass(frozen=True)
class Measured:
    """One step: memory and time, the rows' scored log-probabilities [rows, tail], and the step's own report."""

    memory: PeakMemory
    logps: torch.Tensor
    report: dict[str, Any]


def measure(step: Step, model: Any, branches: list[Branch], store: Any) -> Measured:
    """Runs the step once."""
    logps_of: dict[int, torch.Tensor] = {}

    def loss_fn(logps: torch.Tensor, branch: Branch) -> torch.Tensor:
        logps_of[id(branch)] = logps.detach()[branch.scored.to(logps.device)].float().cpu()
        say(done=len(logps_of), total=len(branches))
        return grpo_loss(logps, branch)

    def tiers() -> dict[str, int]:
        return {} if store is None else dict(store.stats().bytes_used)

    allocate_gradients(model)
    with PeakMemory(model.device, probe=tiers) as memory:
        report = step(branches, loss_fn)
    logps = torch.stack([logps_of[id(branch)] for branch in branches])
    return Measured(memory, logps, {} if report is None else report.as_dict())


def write_gradient(model: torch.nn.Module, path: Path) -> None:
    """All gradients as one run of fp32 numbers."""
    with path.open("wb") as file:
        for parameter in model.parameters():
            if parameter.requires_grad and parameter.grad is not None:
                parameter.grad.float().cpu().numpy().tofile(file)


def run(side: str, folder: Path) -> None:
    """Measures one side and leaves its results in `folder`."""
    settings = DemoSettings.from_json((folder / "settings.json").read_text())
    model = load_model(settings)
    if torch.accelerator.is_available():
        model.to(torch.accelerator.current_accelerator())
    branches = make_branches(settings)
    store = open_demo_store(settings) if side == "tiercache" else None
    try:
        step = replay_step(model, store) if store is not None else dense_step(model)
        warm_up(step, branches)
        say(done=0, total=len(branches))
        measured = measure(step, model, branches, store)
        stats = {} if store is None else store.stats().as_dict()
    finally:
        if store is not None:
            store.close()
    write_gradient(model, folder / f"{side}.gradient")
    measured.logps.numpy().tofile(folder / f"{side}.logps")
    result = {
        "step_s": measured.memory.seconds,
        "peak_bytes": measured.memory.peak_bytes,
        "base_bytes": measured.memory.base_bytes,
        "device": str(model.device),
        "num_parameters": sum(p.numel() for p in model.parameters()),
        "samples": measured.memory.samples,
        "stats": stats,
        "report": measured.report,
    }
    (folder / f"{side}.json").write_text(json.dumps(result))


def main() -> int:
    """Entry of the process."""
    side, folder = sys.argv[1:]
    try:
        run(side, Path(folder))
    except TierCacheError as error:
        say(error=type(error).__name__, message=str(error))
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
