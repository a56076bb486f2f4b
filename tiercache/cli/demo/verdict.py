"""Whether the two sides computed the same gradient."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tiercache.cli.demo.race import SideResult
from tiercache.cli.demo.settings import DemoSettings

LARGEST_DIFFERENCE = 1e-5
_CHUNK = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """How far the two sides are apart.

    Attributes:
        gradient_difference: |ours - dense| / |dense|, Euclidean norms over all parameters, in fp64.
        logp_difference: largest absolute difference of a log-probability.
        exact: whether the gradient difference is at most LARGEST_DIFFERENCE.
    """

    gradient_difference: float
    logp_difference: float

    @property
    def exact(self) -> bool:
        """False, too, when a gradient is not finite."""
        return self.gradient_difference <= LARGEST_DIFFERENCE


def compare(dense: SideResult, ours: SideResult) -> Verdict:
    """Compares what the two sides left."""
    return Verdict(
        gradient_difference=relative_difference(ours.gradient, dense.gradient),
        logp_difference=float(np.abs(ours.logps.astype(np.float64) - dense.logps).max()),
    )


def relative_difference(value: npt.NDArray[np.float32], reference: npt.NDArray[np.float32]) -> float:
    """|value - reference| / |reference|; infinite for different sizes, NaN for values that are not finite."""
    if value.shape != reference.shape:
        return float("inf")
    difference = norm = 0.0
    for start in range(0, value.size, _CHUNK):
        theirs = reference[start : start + _CHUNK].astype(np.float64)
        difference += float(np.square(value[start : start + _CHUNK] - theirs).sum())
        norm += float(np.square(theirs).sum())
    if norm == 0.0:
        return 0.0 if difference == 0.0 else float("inf")
    return float(np.sqrt(difference / norm))


def prompt_tokens_run(settings: DemoSettings, ours: SideResult) -> int:
    """Prompt tokens that the tree has: the prompt once when it became a node, and once a branch otherwise."""
    nodes = int(ours.report["captured_tokens"] + ours.report["tail_tokens"])
    return nodes - settings.branches * settings.tail_tokens


def as_json(settings: DemoSettings, dense: SideResult, ours: SideResult, verdict: Verdict) -> dict[str, Any]:
    """Everything the demo found, for --json."""
    sides = {
        name: {"step_s": side.step_s, "peak_bytes": side.peak_bytes, "device": side.device}
        for name, side in (("dense", dense), ("tiercache", ours))
    }
    return {
        "prompt_tokens": settings.prompt_tokens,
        "branches": settings.branches,
        "tail_tokens": settings.tail_tokens,
        "num_parameters": dense.num_parameters,
        **sides,
        "speedup": dense.step_s / ours.step_s,
        "peak_ratio": ours.peak_bytes / max(dense.peak_bytes, 1),
        "gradient_difference": verdict.gradient_difference,
        "logp_difference": verdict.logp_difference,
        "exact": verdict.exact,
        "prompt_tokens_run": prompt_tokens_run(settings, ours),
        "report": ours.report,
        "store": ours.stats,
    }
