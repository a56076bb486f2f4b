"""The fields of the offload benchmark, from what its runs measured."""

from __future__ import annotations

from statistics import median
from typing import Any

# field -> (at least or at most, limit)
GOALS = {
    "overhead_unlimited": ("<=", 1.03),
    "rss_ratio_disk": ("<=", 0.45),
    "time_ratio_disk": ("<=", 1.25),
    "bytes_moved_over_naive": ("<=", 0.75),
    "budget_overshoot": ("<=", 0),
    "traps_passed": (">=", 30),
    "trl_step_ratio": ("<=", 0.35),
}
TRL = "trl"  # among the models: GRPO on SmolLM2-135M, by trainers
OF_BOTH = (
    "overhead_unlimited",
    "rss_ratio_disk",
    "time_ratio_disk",
    "bytes_moved_over_naive",
    "budget_overshoot",
)
OF_TRL = ("trl_step_ratio", "trl_peak_ratio")

Runs = dict[tuple[str, str], list[dict[str, Any]]]


def compute_fields(results: Runs, models: list[str], traps_passed: int | None) -> dict[str, Any]:
    """All fields, None where what they need did not run.

    One that both models have is the worse of the two; each model's own carries its name.

    Args:
        results: (model, contender) -> what its processes left, in order.
        models: those that ran.
        traps_passed: traps all of whose tests passed; None when they were not run.
    """
    of_models = {model: _of_model(results, model) for model in models if model != TRL}
    fields: dict[str, Any] = dict.fromkeys((*OF_BOTH, "gradients_equal", *OF_TRL))
    for name in OF_BOTH if of_models else ():
        fields[name] = max(of_model[name] for of_model in of_models.values())
        fields["gradients_equal"] = all(of_model["gradients_equal"] for of_model in of_models.values())
    fields["traps_passed"] = traps_passed
    for model, of_model in of_models.items():
        fields |= {f"{name}_{model}": value for name, value in of_model.items()}
    return fields | (_of_trl(results) if TRL in models else {})


def _of_trl(results: Runs) -> dict[str, float]:
    """Ours over the faster and over the smaller of TRL's two configurations."""

    def of(contender: str, what: str) -> float:
        return _median(results, TRL, contender, what)

    fields = {
        f"trl_{short}_{contender}": of(contender, what)
        for contender in ("trl", "trl_defaults", "trl_ours")
        for short, what in (("s", "seconds"), ("peak_bytes", "peak_bytes"))
    }
    return {
        "trl_step_ratio": of("trl_ours", "seconds")
        / min(of("trl", "seconds"), of("trl_defaults", "seconds")),
        "trl_peak_ratio": of("trl_ours", "peak_bytes")
        / min(of("trl", "peak_bytes"), of("trl_defaults", "peak_bytes")),
        **fields,
    }


def _median(results: Runs, model: str, contender: str, what: str) -> float:
    return median(run[what] for result in results[model, contender] for run in result["runs"])


def _of_model(results: Runs, model: str) -> dict[str, Any]:
    def of(contender: str, what: str) -> float:
        return _median(results, model, contender, what)

    def paired(contender: str) -> float:
        """Median of the ratios of runs that were neighbours in time."""
        pairs = zip(results[model, contender], results[model, "none"], strict=False)
        return median(
            median(run["seconds"] for run in ours["runs"]) / median(run["seconds"] for run in none["runs"])
            for ours, none in pairs
        )

    every, disk = results[model, "ours_all"][0], results[model, "ours_disk"][0]
    naive = results[model, "tutorial_disk"][0]
    saved_bytes = results[model, "ours_unlimited"][0]["resident_peak_bytes"]
    steps = len(naive["runs"]) + 1
    # Checkpointing computes some of its numbers twice, and may round them otherwise.
    digests = {
        r["gradients"]
        for (of_model, c), rs in results.items()
        if of_model == model and c != "checkpoint"
        for r in rs
    }
    fields = {
        "overhead_unlimited": paired("ours_unlimited"),
        "rss_ratio_disk": of("ours_disk", "peak_bytes") / of("none", "peak_bytes"),
        "time_ratio_disk": paired("ours_disk"),
        "bytes_moved_over_naive": every["moved_bytes"] / (naive["moved_bytes"] / steps),
        "bytes_stored_over_naive": every["stored_bytes"] / (naive["moved_bytes"] / steps),
        "budget_overshoot": max(0, disk["overshoot_bytes"]) / disk["stats"]["bytes_capacity"]["device"],
        "share_moved_disk": disk["moved_bytes"] / saved_bytes,
        "gradients_equal": len(digests) == 1,
        "seconds_none": of("none", "seconds"),
        "peak_bytes_none": of("none", "peak_bytes"),
    }
    for contender in ("identity", "save_on_cpu", "checkpoint", "tutorial_disk"):
        fields[f"time_ratio_{contender}"] = paired(contender)
        fields[f"rss_ratio_{contender}"] = of(contender, "peak_bytes") / of("none", "peak_bytes")
    return fields
