"""The fields of the planner's benchmark, from what its runs measured."""

from __future__ import annotations

from statistics import median
from typing import Any

from planner_plan import BUDGETS, DENSE_ROWS, MODES, PREDICTED
from planner_throttle import hidden_fraction
from replay_workload import Shape

# field -> (at least or at most, limit)
GOALS = {
    "bytes_over_bound": ("<=", 1.05),
    "optimal_fraction": (">=", 0.95),
    "plan_ms_per_1k_visits": ("<=", 200.0),
    "hidden_fraction": (">=", 0.9),
    "hidden_fraction_no_prefetch": ("<=", 0.3),
    "hidden_fraction_training": (">=", 0.9),
    "fraction_of_ideal_all": (">=", 0.85),
    "auto_over_best_fixed": ("<=", 1.03),
    "plan_error_pct_memory": ("<=", 10.0),
    "plan_error_pct_time": ("<=", 25.0),
}
_PASSES = 3
"""Forwards that a shared token costs at the least: one forward, and a backward of two."""

Results = dict[str, list[dict[str, Any]]]


def seconds(results: Results, job: str) -> float:
    """Time of a step of a job: the median of its runs."""
    return median(run["seconds"] for result in results[job] for run in result["runs"])


def peak_bytes(results: Results, job: str) -> float:
    """Peak resident bytes of a step above the loaded model and its gradients."""
    return median(run["peak_bytes"] for result in results[job] for run in result["runs"])


def best_fixed(results: Results, budgets: str) -> str:
    """The fastest fixed mode under these budgets."""
    fixed = [mode for mode in MODES if mode != "auto"]
    return min(fixed, key=lambda mode: seconds(results, f"{budgets}_{mode}"))


def ideal(shape: Shape) -> float:
    """Dense token-passes over the tree's where nothing is run twice."""
    return _PASSES * shape.dense_tokens / (_PASSES * (shape.prompt + sum(shape.tail_lengths())))


def compute_fields(results: Results, shapes: dict[str, Shape]) -> dict[str, Any]:
    """All fields.

    Args:
        results: job name -> what its processes left.
        shapes: by name.
    """
    return {
        **results["order"][0]["fields"],
        **_hidden_fields(results),
        **_ideal_fields(results, shapes["main"]),
        **_auto_fields(results),
        **_error_fields(results),
    }


def _hidden_fields(results: Results) -> dict[str, float]:
    """Of the run whose transfers are reads for the most part, and of the training step."""
    fields = {}
    for suffix, run in (("", "scoring"), ("_training", "training")):
        for name, job in (("hidden_fraction", "throttled"), ("hidden_fraction_no_prefetch", "no_prefetch")):
            fields[name.replace("fraction", f"fraction{suffix}")] = median(
                hidden_fraction(found, result["bytes_per_s"])
                for result in results[f"{job}_{run}"]
                for found in result["runs"]
            )
    return fields


def _ideal_fields(results: Results, shape: Shape) -> dict[str, float]:
    """Speed-up over dense training, over that of a tree that runs nothing twice, by mode."""
    timed_tokens = DENSE_ROWS * (shape.prompt + shape.tail)
    dense_s = seconds(results, "dense") / timed_tokens * shape.dense_tokens
    fields = {"dense_s": dense_s, "ideal": ideal(shape)}
    for mode in MODES:
        taken_s = seconds(results, f"roomy_{mode}")
        fields[f"fraction_of_ideal_{mode}"] = dense_s / taken_s / ideal(shape)
    return fields


def _auto_fields(results: Results) -> dict[str, Any]:
    """Times of every mode in single runs, and of "auto" over the fixed mode that was best there in runs by turns."""
    fields: dict[str, Any] = {}
    for budgets in BUDGETS:
        fields |= {f"{budgets}_{mode}_s": seconds(results, f"{budgets}_{mode}") for mode in MODES}
        fields[f"best_fixed_{budgets}"] = best_fixed(results, budgets)
        ratios = pair_ratios(results[f"{budgets}_pair"])
        fields[f"auto_over_best_fixed_{budgets}"] = median(ratios)
        fields[f"auto_over_best_fixed_{budgets}_range"] = [min(ratios), max(ratios)]
    fields["auto_over_best_fixed"] = max(fields[f"auto_over_best_fixed_{name}"] for name in BUDGETS)
    return fields


def pair_ratios(results: list[dict[str, Any]]) -> list[float]:
    """Seconds of "auto" over those of the other mode, turn by turn."""
    runs = [run for result in results for run in result["runs"]]
    auto, fixed = (
        [r["seconds"] for r in runs if (r["mode"] == "auto") is is_auto] for is_auto in (True, False)
    )
    return [a / f for a, f in zip(auto, fixed, strict=True)]


def _error_fields(results: Results) -> dict[str, float]:
    """Predicted over measured, in per cent: of each size, and the largest either way."""
    predicted = results["predict"][0]["predicted"]
    fields = {}
    for what, measured, key in (("memory", peak_bytes, "peak_bytes"), ("time", seconds, "seconds")):
        errors = {name: 100 * (predicted[name][key] / measured(results, name) - 1) for name in PREDICTED}
        fields[f"plan_error_pct_{what}"] = max(abs(error) for error in errors.values())
        fields |= {f"plan_error_pct_{what}_{name}": error for name, error in errors.items()}
    return fields
