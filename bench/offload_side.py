"""One contender's run in a process of its own: `python bench/offload_side.py JOB.json`; leaves JOB.out.json."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jobs import serve_job
from offload_contenders import Contender
from offload_fields import TRL
from offload_workload import digest_gradients, make_step, zero_gradients

from tiercache.cli.peak_memory import PeakMemory


def run(job: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Carries out one job.

    Args:
        job: contender, model, steps (timed ones, after one that is not), device_bytes, tiny.
        folder: with the model; gets what goes to disk.
    """
    if job["model"] == TRL:
        import offload_trl

        return offload_trl.run(job, folder)
    model, loss = make_step(
        job["model"], folder, tiny=job["tiny"], checkpointed=job["contender"] == "checkpoint"
    )
    contender = Contender(job["contender"], folder, job.get("device_bytes"))
    runs = []
    for _ in range(1 + job["steps"]):
        zero_gradients(model)
        with PeakMemory() as memory, contender.context():
            loss().backward()
        runs.append({"seconds": memory.seconds, "peak_bytes": memory.peak_bytes})
    return {"runs": runs[1:], "gradients": digest_gradients(model), **contender.finish()}


if __name__ == "__main__":
    serve_job(run)
