"""Which steps the planner's benchmark runs, under which budgets, and in which order."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from replay_workload import Shape

MODES = ("all", "attention", "layer_inputs", "recompute", "auto")
SHAPES = {
    "main": Shape(prompt=4096, tail=64, branches=4),
    "half": Shape(prompt=2048, tail=64, branches=4),
    "tails": Shape(prompt=1024, tail=256, branches=8),
    "short": Shape(prompt=512, tail=128, branches=4),
    "scored": Shape(prompt=1024, tail=128, branches=64),
    "trained": Shape(prompt=2048, tail=128, branches=4),
}
BUDGETS: dict[str, dict[str, str]] = {
    "roomy": {"device": "8GiB"},
    "spilling": {"device": "64MiB", "host": "256MiB", "disk_capacity": "8GiB"},
}
THROTTLED: dict[str, dict[str, Any]] = {
    "scoring": {
        "shape": "scored", "call": "logprobs", "device": "16MiB", "host": None, "options": {"max_visit_tokens": 512}
    },
    "training": {
        "shape": "trained", "call": "backward", "device": "64MiB", "host": "64MiB", "options": {"max_visit_tokens": 512}
    },
}  # fmt: skip
"""Runs over a slow disk tier, which takes what these budgets do not: log-probs of 64 tails without gradients, in 16
visits that each read the prompt's pages, so that most transfers are reads; and a training step that replays all tails
in one visit, where half of them are writes."""
DENSE_ROWS = 1


@dataclass(frozen=True)
class StepJob:
    """One process that runs steps of one contender.

    Attributes:
        name: of the job in the results.
        mode: value of `prefix_activations`, or "dense".
        shape: key of SHAPES.
        budgets: key of BUDGETS; none of dense training.
        rows: how many to run; all by default.
    """

    name: str
    mode: str
    shape: str
    budgets: str = ""
    rows: int | None = None

    def as_dict(self, shapes: dict[str, Shape]) -> dict[str, Any]:
        """What planner_side.py reads."""
        return {
            "kind": "step",
            "mode": self.mode,
            "shape": asdict(shapes[self.shape]),
            "budgets": BUDGETS.get(self.budgets, {}),
            "rows": self.rows,
        }


@dataclass
class Plan:
    """Jobs of one run of the benchmark.

    Attributes:
        rounds: of all steps.
        pairs: of "auto" and the fixed mode that was best, which are compared.
        steps: of one round, in order.
    """

    rounds: int
    pairs: int
    steps: list[StepJob] = field(default_factory=list)


def plan(*, quick: bool) -> Plan:
    """Contenders take turns, so that a machine that slows down slows all of them."""
    steps = [StepJob("dense", "dense", "main", rows=DENSE_ROWS)]
    for budgets, shape in (("roomy", "main"), ("spilling", "half")):
        steps += [StepJob(f"{budgets}_{mode}", mode, shape, budgets) for mode in MODES]
    steps += [
        StepJob("tails", "recompute", "tails", "roomy"),
        StepJob("short", "layer_inputs", "short", "roomy"),
    ]
    return Plan(1 if quick else 3, 5 if quick else 9, steps)


PREDICTED = ("roomy_all", "roomy_attention", "roomy_layer_inputs", "spilling_layer_inputs", "tails", "short")
"""Steps that are planned too: the six sizes."""
