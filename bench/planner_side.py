"""One job of the planner's benchmark in a process of its own: `python bench/planner_side.py JOB.json`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from jobs import serve_job
from planner_order import order_fields
from planner_predict import predict
from planner_throttle import run_throttled
from replay_contenders import Contender, dense
from replay_side import allocate_gradients, shortened
from replay_workload import BenchRow, Shape, load_weights, make_rows, mean_loss

import tiercache
from tiercache.cli.peak_memory import PeakMemory


def replaying(model: Any, folder: Path, mode: str, budgets: dict[str, str]) -> Contender:
    """A step through a store of these budgets."""
    disk = {"disk": str(folder / f"disk_{mode}")} if "disk_capacity" in budgets else {}
    store = tiercache.open_store(**budgets, **disk)
    replay = tiercache.runtime.BranchReplay(model, store, prefix_activations=mode)

    def step(rows: list[BenchRow]) -> dict[str, Any]:
        return {"report": replay.backward(rows, mean_loss).as_dict()}

    return step


def run_step(job: dict[str, Any], folder: Path) -> dict[str, Any]:
    """One step, after a short one that is not timed.

    Args:
        job: mode, shape, budgets, rows (how many to run; all by default).
        folder: with the model and the text.
    """
    model = load_weights(folder, torch.bfloat16)
    rows = make_rows(folder, Shape(**job["shape"]))[: job["rows"]]
    is_dense = job["mode"] == "dense"
    step = dense(model, folder) if is_dense else replaying(model, folder, job["mode"], job["budgets"])
    step(shortened(rows))
    allocate_gradients(model)
    with PeakMemory() as memory:
        found = step(rows)
    return {"runs": [{"seconds": memory.seconds, "peak_bytes": memory.peak_bytes, **found}]}


def run_pair(job: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Steps of two modes that take turns in one process, after a short one of each that is not timed.

    Args:
        job: modes, shape, budgets, rounds.
        folder: with the model and the text.
    """
    model, rows = load_weights(folder, torch.bfloat16), make_rows(folder, Shape(**job["shape"]))
    steps = {mode: replaying(model, folder, mode, job["budgets"]) for mode in job["modes"]}
    for step in steps.values():
        step(shortened(rows))
    allocate_gradients(model)
    runs = []
    for turn in range(job["rounds"] + 1):
        for mode in job["modes"] if turn % 2 else job["modes"][::-1]:
            with PeakMemory() as memory:
                steps[mode](rows)
            if turn:  # in the first whole step of a process memory is new
                runs.append({"mode": mode, "seconds": memory.seconds, "peak_bytes": memory.peak_bytes})
    return {"runs": runs}


def run_order(job: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The order of visits."""
    del folder
    with PeakMemory() as memory:
        fields = order_fields(quick=job["quick"])
    return {"runs": [{"seconds": memory.seconds, "peak_bytes": memory.peak_bytes}], "fields": fields}


KINDS: dict[str, Callable[[dict[str, Any], Path], dict[str, Any]]] = {
    "step": run_step,
    "pair": run_pair,
    "order": run_order,
    "throttled": run_throttled,
    "predict": predict,
}


def run(job: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Carries out one job of any kind."""
    return KINDS[job["kind"]](job, folder)


if __name__ == "__main__":
    serve_job(run)
