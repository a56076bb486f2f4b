"""tiercache with its pages coded beside tiercache as it is by default: whether a codec slows a step down."""

from __future__ import annotations

from statistics import median
from typing import Any

from replay_plan import Job

SHAPE = "p2048"


def codec_field(codec: str) -> str:
    """Name of the field: time of a step with the codec over that of the default."""
    return f"{codec}_over_default"


def codec_goals(codec: str) -> dict[str, tuple[str, float]]:
    """A step may not get slower; two runs of the same thing differ by up to 2 %."""
    return {codec_field(codec): ("<=", 1.02)}


def codec_plan(codec: str, *, quick: bool) -> list[Job]:
    """The default and the codec in turns: one run of each, or two in the order A B B A."""
    default = Job("tiercache", "tiercache", (SHAPE,), {})
    coded = Job(f"tiercache_{codec}", "tiercache", (SHAPE,), {"options": {"codec": codec}})
    return [default, coded] if quick else [default, coded, coded, default]


def codec_fields(codec: str, results: dict[str, list[dict[str, Any]]]) -> dict[str, float]:
    """Seconds of a step, their quotient, and what went to the disk."""
    fields = {}
    for label, job in (("default", "tiercache"), (codec, f"tiercache_{codec}")):
        runs = [run for result in results[job] for run in result["runs"]]
        fields[f"{label}_s"] = median(run["seconds"] for run in runs)
        fields[f"{label}_to_disk_bytes"] = median(
            sum(n for way, n in run["store"]["bytes_moved"].items() if way.endswith("->disk")) for run in runs
        )
    return {codec_field(codec): fields[f"{codec}_s"] / fields["default_s"], **fields}
