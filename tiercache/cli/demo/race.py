"""Runs the two sides, one after the other, and reads what they left."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tiercache import errors
from tiercache.cli.demo.settings import DemoSettings

Progress = Callable[[int, int], None]
_MODULE = "tiercache.cli.demo.side"


@dataclass(frozen=True, kw_only=True)
class SideResult:
    """What one side measured.

    Attributes:
        step_s: seconds of the step.
        peak_bytes: peak memory of the step above the loaded model and its gradients.
        samples: (seconds, bytes above the base, bytes used by tier) over the step.
        stats: counters of the store, empty for dense training.
        report: what the step says of itself, empty for dense training.
        device: where the model ran.
        num_parameters: weights of the model.
        gradient: fp32 gradient of every trainable parameter, a file mapped read-only.
        logps: [rows, tail] fp32.
    """

    step_s: float
    peak_bytes: int
    samples: list[tuple[float, int, dict[str, int]]]
    stats: dict[str, Any]
    report: dict[str, Any]
    device: str
    num_parameters: int
    gradient: npt.NDArray[np.float32]
    logps: npt.NDArray[np.float32]


def run_side(side: str, settings: DemoSettings, folder: Path, progress: Progress) -> SideResult:
    """Runs "dense" or "tiercache" in a process of its own.

    Args:
        side: which.
        settings: options of the demo.
        folder: where the process leaves its results.
        progress: called with (rows done, rows in all).

    Raises:
        TierCacheError: the error that the side ended with, or what is known when it ended without one.
    """
    (folder / "settings.json").write_text(settings.to_json())
    log = folder / f"{side}.log"
    command = [sys.executable, "-m", _MODULE, side, str(folder)]
    failure: errors.TierCacheError | None = None
    with log.open("w") as errlog:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errlog, text=True
        )
        try:
            assert process.stdout is not None
            for line in process.stdout:
                event = _parse(line)
                if "error" in event:
                    failure = _named_error(event)
                elif "done" in event:
                    progress(event["done"], event["total"])
            status = process.wait()
        finally:
            process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()
    if failure is not None:
        raise failure
    if status != 0:
        raise errors.TierCacheError(f"the {side} side ended with status {status}: {_last_words(log, status)}")
    return _read(side, settings, folder)


def _parse(line: str) -> dict[str, Any]:
    try:
        event = json.loads(line)
    except ValueError:
        return {}  # a library that prints
    return event if isinstance(event, dict) else {}


def _named_error(event: dict[str, Any]) -> errors.TierCacheError:
    kind = getattr(errors, str(event["error"]), errors.TierCacheError)
    error: errors.TierCacheError = kind(str(event["message"]))
    return error


def _last_words(log: Path, status: int) -> str:
    if status == -9:
        return "killed, most likely for memory; give it fewer --prompt-tokens"
    lines = log.read_text(errors="replace").strip().splitlines()
    return lines[-1] if lines else "no message"


def _read(side: str, settings: DemoSettings, folder: Path) -> SideResult:
    found = json.loads((folder / f"{side}.json").read_text())
    return SideResult(
        step_s=found["step_s"],
        peak_bytes=found["peak_bytes"],
        samples=[(seconds, held, tiers) for seconds, held, tiers in found["samples"]],
        stats=found["stats"],
        report=found["report"],
        device=found["device"],
        num_parameters=found["num_parameters"],
        gradient=np.memmap(folder / f"{side}.gradient", dtype=np.float32, mode="r"),
        logps=np.fromfile(folder / f"{side}.logps", dtype=np.float32).reshape(settings.branches, -1),
    )
