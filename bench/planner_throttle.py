"""A disk tier as slow as it is told to be: how much of its transfers hides behind scoring and training."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import torch
from replay_side import allocate_gradients, shortened
from replay_workload import BenchRow, Shape, load_weights, make_rows, mean_loss

import tiercache
from tiercache.cli.peak_memory import PeakMemory
from tiercache.errors import ConfigError
from tiercache.testing import FaultTier, MemoryTier

SHARE = 0.8
"""Of the step's compute time, what all transfers of the throttled tier take."""
_CAPACITY = 4 << 30


class Throttle:
    """One drive that serves requests one after the other at a rate.

    Args:
        bytes_per_s: of reads and writes; None: at once.

    Attributes:
        num_bytes: that went through.
    """

    def __init__(self, bytes_per_s: float | None) -> None:
        self.bytes_per_s = bytes_per_s
        self.num_bytes = 0
        self._free_at_s = 0.0
        self._lock = threading.Lock()

    def __call__(self, called: str, num_bytes: int) -> None:
        """Waits for the drive's turn and for the transfer."""
        if called == "reserve":
            return
        with self._lock:
            self.num_bytes += num_bytes
            if self.bytes_per_s is None:
                return
            now_s = time.perf_counter()
            self._free_at_s = max(now_s, self._free_at_s) + num_bytes / self.bytes_per_s
            wait_s = self._free_at_s - now_s
        time.sleep(wait_s)


def forgo_look_ahead() -> None:
    """Lets no store of this process bring anything up before it is asked for."""
    from tiercache import follow

    def nothing(*_: Any) -> list[Any]:
        return []

    follow.Follower.look_ahead = nothing  # type: ignore[method-assign]


def run_throttled(job: dict[str, Any], folder: Path) -> dict[str, Any]:
    """A run over the throttled tier, after a short one that is not timed.

    Args:
        job: shape, call (of the replay), budgets of device and host, options of the replay, bytes_per_s (None: as fast
            as memory), prefetch.
        folder: with the model and the text.
    """
    if not job["prefetch"]:
        forgo_look_ahead()
    model, rows = load_weights(folder, torch.bfloat16), make_rows(folder, Shape(**job["shape"]))
    throttle = Throttle(None)
    disk = FaultTier(MemoryTier(_CAPACITY, name="disk"), throttle)
    with tiercache.open_store(device=job["device"], host=job["host"], disk=disk, timeout_s=600) as store:
        replay = tiercache.runtime.BranchReplay(model, store, **job["options"])
        run = scoring if job["call"] == "logprobs" else training
        run(replay, shortened(rows))
        if run is training:
            allocate_gradients(model)
        throttle.bytes_per_s, throttle.num_bytes = job["bytes_per_s"], 0
        with PeakMemory() as memory:
            report = run(replay, rows)
        found = {
            "seconds": memory.seconds,
            "peak_bytes": memory.peak_bytes,
            "stall_s": report.stall_s + report.put_stall_s,
            "throttled_bytes": throttle.num_bytes,
            "bytes_moved": report.bytes_moved,
        }
    return {"runs": [found], "bytes_per_s": job["bytes_per_s"]}


def training(replay: Any, rows: list[BenchRow]) -> Any:
    """A training step; its report."""
    return replay.backward(rows, mean_loss)


def scoring(replay: Any, rows: list[BenchRow]) -> Any:
    """Log-probs of rows of one length, without gradients; their report."""
    tokens, scored = (torch.stack([getattr(row, name) for row in rows]) for name in ("tokens", "scored"))
    with torch.no_grad():
        replay.logprobs(tokens, None, scored)
    return replay.report


def rate_for(free: dict[str, Any]) -> float:
    """Bytes a second at which a run's transfers take SHARE of its compute, from the run without a limit."""
    if not free["throttled_bytes"]:
        raise ConfigError(
            "throttled step: nothing went to the disk tier, so nothing can hide",
            got=f"moved {free['bytes_moved']}",
            remedy="lower THROTTLED's budgets of device and host",
        )
    return free["throttled_bytes"] / (SHARE * (free["seconds"] - free["stall_s"]))


def hidden_fraction(run: dict[str, Any], bytes_per_s: float) -> float:
    """Share of the transfer time that nothing waited for."""
    return 1.0 - run["stall_s"] * bytes_per_s / run["throttled_bytes"]
