"""The fields of the replay benchmark, from what its runs measured."""

from __future__ import annotations

from statistics import median
from typing import Any

from replay_plan import DENSE_ROWS
from replay_workload import Shape

# field -> (at least or at most, limit)
GOALS = {
    "fraction_of_ideal": (">=", 0.9),
    "fraction_of_ideal_g16": (">=", 0.9),
    "fraction_of_ideal_ragged": (">=", 0.75),
    "opening_overhead": ("<=", 1.03),
    "peak_rss_ratio": ("<=", 0.4),
    "peak_rss_ratio_ckpt": ("<=", 1.0),
    "peak_growth_g": ("<=", 1.02),
    "peak_growth_p": ("<=", 1.15),
    "detached_over_exact": (">=", 1.8),
    "speedup_over_prefix_grouper": (">=", 1.2),
    "peak_over_prefix_grouper": ("<=", 0.3),
    "grad_error_over_dense": ("<=", 1.1),
}


class Runs:
    """Medians over the runs of each job.

    Args:
        results: job name -> what its processes left, in order.
        shapes: the shapes that the jobs named.
    """

    def __init__(self, results: dict[str, list[dict[str, Any]]], shapes: dict[str, Shape]) -> None:
        self.shapes = shapes
        self._results = results

    def _of(self, job: str, shape: int = 0) -> list[dict[str, Any]]:
        return [run for result in self._results[job] for run in result["runs"] if run["shape"] == shape]

    def seconds(self, job: str, shape: int = 0) -> float:
        """Time of a step."""
        return median(run["seconds"] for run in self._of(job, shape))

    def sums(self, job: str) -> float:
        """Bytes of the fp32 sums of parameter gradients, 0 for contenders that have none."""
        return median(run.get("report", {}).get("gradient_sum_bytes", 0) for run in self._of(job))

    def peak(self, job: str, *, with_sums: bool = False) -> float:
        """Peak resident bytes of a step above the loaded model and its gradients."""
        peak = median(run["peak_bytes"] for run in self._of(job))
        return peak if with_sums else peak - self.sums(job)

    def stall_fraction(self, job: str) -> float:
        """Part of the step in which reads waited."""
        return median(run["report"]["stall_s"] / run["seconds"] for run in self._of(job))

    def dense_seconds(self, shape: str) -> float:
        """Time of dense training on a shape: the faster dense contender's rows, scaled by tokens."""
        main = self.shapes["main"]
        timed_tokens = DENSE_ROWS * (main.prompt + main.tail)
        per_token = min(self.seconds("dense"), self.seconds("dense_checkpointed")) / timed_tokens
        return per_token * self.shapes[shape].dense_tokens


def compute_fields(
    results: dict[str, list[dict[str, Any]]], shapes: dict[str, Shape], errors: dict[str, float]
) -> dict[str, float]:
    """All fields.

    Args:
        results: job name -> what its processes left.
        shapes: the shapes that the jobs named.
        errors: relative gradient errors against the fp32 reference, by contender.
    """
    runs = Runs(results, shapes)
    exact = runs.dense_seconds("main") / runs.seconds("tiercache")
    exact_g16 = runs.dense_seconds("g16") / runs.seconds("tiercache_g16")
    ragged = runs.dense_seconds("ragged") / runs.seconds("tiercache_ragged")
    detached = runs.dense_seconds("main") / runs.seconds("tiercache_detached")
    fields = {
        "speedup_exact": exact,
        "speedup_exact_g16": exact_g16,
        "ideal_exact": shapes["main"].ideal,
        "ideal_exact_g16": shapes["g16"].ideal,
        "fraction_of_ideal": exact / shapes["main"].ideal,
        "fraction_of_ideal_g16": exact_g16 / shapes["g16"].ideal,
        "fraction_of_ideal_ragged": ragged / shapes["ragged"].ideal,
        "opening_overhead": runs.seconds("opening", 0) / runs.seconds("opening", 1),
        "speedup_detached": detached,
        "detached_over_exact": detached / exact,
        "speedup_over_prefix_grouper": runs.seconds("prefix_grouper") / runs.seconds("tiercache"),
        "peak_over_prefix_grouper": runs.peak("tiercache") / runs.peak("prefix_grouper"),
        "peak_rss_ratio": runs.peak("tiercache") / runs.peak("dense"),
        "peak_rss_ratio_ckpt": runs.peak("tiercache") / runs.peak("dense_checkpointed"),
        "peak_rss_ratio_with_sums": runs.peak("tiercache", with_sums=True) / runs.peak("dense"),
        "peak_growth_g": runs.peak("tiercache_g16") / runs.peak("tiercache_g2"),
        "peak_growth_p": runs.peak("tiercache_p8000") / runs.peak("tiercache_p2048"),
        "grad_rel_l2_fp32": errors["tiercache"],
        "grad_rel_l2_fp32_dense": errors["dense"],
        "grad_error_over_dense": errors["tiercache"] / errors["dense"],
        "stall_fraction": runs.stall_fraction("tiercache"),
        "tiercache_s": runs.seconds("tiercache"),
        "dense_s": runs.dense_seconds("main"),
        "prefix_grouper_s": runs.seconds("prefix_grouper"),
        "peak_rss_bytes": runs.peak("tiercache"),
        "peak_rss_bytes_dense": runs.peak("dense"),
        "peak_rss_bytes_ckpt": runs.peak("dense_checkpointed"),
        "peak_rss_bytes_prefix_grouper": runs.peak("prefix_grouper"),
        "fp32_sum_bytes": runs.sums("tiercache"),
    }
    if "dense_all_rows" in results:
        fields["dense_s_all_rows"] = runs.seconds("dense_all_rows")
    return fields
