"""What `tiercache plan` says of steps that the benchmark runs, from a profile of this machine and no weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from replay_workload import Shape

from tiercache.cli.peak_memory import PeakMemory
from tiercache.config import parse_size
from tiercache.measure.timing import Budget
from tiercache.measure.whole import measure_profile
from tiercache.runtime.planning.hardware import Hardware, find_hardware
from tiercache.runtime.planning.model import load_config
from tiercache.runtime.planning.planner import Job, plan_job
from tiercache.runtime.speed import attention_kernels


def predict(job: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Profiles the machine and plans each step.

    Args:
        job: steps, by name what planner_side.py reads of each; seconds of each figure of the profile.
        folder: with the model; gets the profile.
    """
    drive = folder / "profiled"
    drive.mkdir(exist_ok=True)
    with PeakMemory() as memory:
        budget = Budget(seconds=job["seconds"])
        kernels = attention_kernels()
        profile = measure_profile(kernels, directories=[drive], dtypes=(torch.bfloat16,), budget=budget)
        profile.save(folder / "profile.json")
        hardware, config = find_hardware(str(folder / "profile.json")), load_config(folder / "model")
        predicted = {name: plan_step(step, config, hardware) for name, step in job["steps"].items()}
    return {
        "runs": [{"seconds": memory.seconds, "peak_bytes": memory.peak_bytes}],
        "predicted": predicted,
        "profile": profile.as_dict(),
    }


def plan_step(step: dict[str, Any], config: Any, hardware: Hardware) -> dict[str, Any]:
    """Seconds of a step, and what it takes beside the weights."""
    shape = Shape(**step["shape"])
    budgets = {name: parse_size(size, name) for name, size in step["budgets"].items()}
    asked = Job(prompt_tokens=shape.prompt, tail_tokens=shape.tail, branches=shape.branches, optimizer="none")
    planned = plan_job(
        config, asked, hardware, device=budgets["device"], host=budgets.get("host", 0),
        disk=budgets.get("disk_capacity", 0), names=(step["mode"],),
    )  # fmt: skip
    choice = planned.choices[0]
    estimate, held = choice.estimate, choice.device_bytes
    peak_bytes = held["sums"] + held["visit"] + held["store"] + estimate.tier_bytes["host"]
    phases = {kind: phase.seconds for kind, phase in estimate.phases.items()}
    return {"seconds": estimate.seconds, "peak_bytes": peak_bytes, "phases": phases}
