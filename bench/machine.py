"""The machine that a benchmark ran on, in the words that its JSON carries."""

from __future__ import annotations

import os
import platform
import time
from pathlib import Path
from typing import Any

import psutil
import torch

from tiercache import _core


def describe_machine() -> dict[str, Any]:
    """Processor, cores, memory, accelerator and versions."""
    names = [
        line.partition(":")[2].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")
    ]
    accelerator = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "processor": names[0] if names else platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "available_memory_gib": round(_core.available_memory() / 2**30, 1),
        "accelerator": accelerator,
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "load_average": round(os.getloadavg()[0], 2),
    }


def _lines(path: str) -> list[str]:
    file = Path(path)
    return file.read_text().splitlines() if file.is_file() else []
