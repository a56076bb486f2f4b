"""What tiers cost, for estimates of stall: a JSON file, or figures of a usual machine."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from tiercache.policies.errors import ConfigError

TIERS = ("device", "host", "disk")


@dataclass(frozen=True, slots=True)
class Speed:
    """Reads from a tier into the one above: seconds before the first byte, then bytes a second."""

    latency_s: float
    bytes_per_s: float


USUAL = {
    "device": Speed(0.0, float("inf")),
    "host": Speed(20e-6, 25e9),
    "disk": Speed(150e-6, 5e9),
    "source": Speed(5e-3, 2e9),
}
"""PCIe 4 x16, one NVMe drive, and recomputation, roughly; measure your own with `tiercache profile`."""


def read_profile(path: str | Path | None) -> dict[str, Speed]:
    """Speeds by tier from a profile file, as `tiercache profile` writes it; what it does not name is usual.

    Of the file only {"tiers": {"host": {"read_latency_s": s, "read_bytes_per_s": n}, ...}} is read, so a few lines
    written by hand will do; "source" there is what no tier holds.

    Raises:
        ConfigError: the file is no such JSON, or a figure is not positive.
    """
    if path is None:
        return dict(USUAL)
    try:
        told = json.loads(Path(path).read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"profile {path}: cannot be read", got=error) from error
    tiers = told.get("tiers") if isinstance(told, dict) else None
    if not isinstance(tiers, dict):
        raise ConfigError(f"profile {path}: no table of tiers", remedy="write it with tiercache profile")
    speeds = dict(USUAL)
    for name, figures in tiers.items():
        if name not in speeds or not isinstance(figures, dict):
            raise ConfigError(f"profile {path}: tier {name}", got=figures, limit=", ".join(speeds))
        rate = figures.get("read_bytes_per_s", speeds[name].bytes_per_s)
        latency = figures.get("read_latency_s", speeds[name].latency_s)
        if not (
            isinstance(rate, int | float) and rate > 0 and isinstance(latency, int | float) and latency >= 0
        ):
            raise ConfigError(
                f"profile {path}: tier {name}", got=figures, limit="read_latency_s >= 0, read_bytes_per_s > 0"
            )
        speeds[name] = Speed(float(latency), float(rate))
    return speeds
