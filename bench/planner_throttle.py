"""A disk tier as slow as it is told to be, under a training step: how much of its transfers hides behind compute."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import torch
from replay_side import allocate_gradients, shortened
from replay_workload import Shape, load_weights, make_rows, mean_loss

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
    """A step over the throttled tier.

    Args:
        job: shape, budgets of device and host, bytes_per_s (None: as fast as memory), prefetch.
        folder: with the model and the text.
    """
    if not job["prefetch"]:
        forgo_look_ahead()
    model, rows = load_weights(folder, torch.bfloat16), make_rows(folder, Shape(**job["shape"]))
    throttle = Throttle(None)
    disk = FaultTier(MemoryTier(_CAPACITY, name="disk"), throttle)
    with tiercache.open_store(device=job["device"], host=job["host"], disk=disk, timeout_s=600) as store:
        replay = tiercache.runtime.BranchReplay(model, store)
        replay.backward(shortened(rows), mean_loss)
        allocate_gradients(model)
        throttle.bytes_per_s, throttle.num_bytes = job["bytes_per_s"], 0
        with PeakMemory() as memory:
            report = replay.backward(rows, mean_loss)
        run = {
            "seconds": memory.seconds,
            "peak_bytes": memory.peak_bytes,
            "stall_s": report.stall_s + report.put_stall_s,
            "throttled_bytes": throttle.num_bytes,
            "bytes_moved": report.bytes_moved,
        }
    return {"runs": [run], "bytes_per_s": job["bytes_per_s"]}


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
