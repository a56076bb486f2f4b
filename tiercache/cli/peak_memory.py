"""Peak memory of a stretch of work, and memory over time, of this process or its accelerator."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil
import torch

from tiercache.runtime.memory import release_free_memory

_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")


def resident_bytes() -> int:
    """Resident bytes of this process now."""
    return int(psutil.Process().memory_info().rss)


def _reset_high_water() -> bool:
    """Resets the kernel's own peak of this process; False where it has none or forbids it."""
    try:
        _CLEAR_REFS.write_text("5")
    except OSError:
        return False
    return True


def _high_water_bytes() -> int:
    lines = _STATUS.read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))


class PeakMemory:
    """Measures the block it surrounds: what memory rose to above where it stood at the start.

    On the CPU that is the kernel's high-water mark of resident memory, reset at the start (the highest
    sample where the kernel forbids that); on an accelerator, its allocator's. A thread samples meanwhile.

    Args:
        device: where the work happens.
        interval_s: time between samples.
        probe: called at each sample; its numbers are kept beside the sample.

    Attributes:
        base_bytes: memory in use at the start.
        peak_bytes: most memory in use in the block, less base_bytes.
        seconds: time the block took.
        samples: (seconds since the start, bytes above base_bytes, the probe's numbers).
    """

    def __init__(
        self,
        device: torch.device | None = None,
        *,
        interval_s: float = 0.02,
        probe: Callable[[], dict[str, int]] | None = None,
    ) -> None:
        self._device = device if device is not None and device.type != "cpu" else None
        self._interval_s = interval_s
        self._probe = probe if probe is not None else dict
        self._done = threading.Event()
        self._sampler = threading.Thread(target=self._sample_until_done, name="peak-memory", daemon=True)
        self.base_bytes = 0
        self.peak_bytes = 0
        self.seconds = 0.0
        self.samples: list[tuple[float, int, dict[str, int]]] = []

    def __enter__(self) -> Self:
        gc.collect()
        release_free_memory(torch.device("cpu"))  # what was freed before is in nobody's peak
        if self._device is not None:
            torch.accelerator.synchronize(self._device)
            torch.accelerator.reset_peak_memory_stats(self._device)
        self._has_high_water = _reset_high_water()
        self.base_bytes = self._now_bytes()
        self._start_s = time.perf_counter()
        self._sampler.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._device is not None:
            torch.accelerator.synchronize(self._device)
        self.seconds = time.perf_counter() - self._start_s
        self._done.set()
        self._sampler.join()
        self.peak_bytes = max(self._peak_bytes() - self.base_bytes, 0)

    def _now_bytes(self) -> int:
        if self._device is not None:
            return int(torch.accelerator.memory_allocated(self._device))
        return resident_bytes()

    def _peak_bytes(self) -> int:
        if self._device is not None:
            return int(torch.accelerator.max_memory_allocated(self._device))
        if self._has_high_water:
            return _high_water_bytes()
        return self.base_bytes + max((sample[1] for sample in self.samples), default=0)

    def _sample_until_done(self) -> None:
        while True:
            finished = self._done.wait(self._interval_s)
            elapsed_s = time.perf_counter() - self._start_s
            self.samples.append((elapsed_s, self._now_bytes() - self.base_bytes, self._probe()))
            if finished:
                return
