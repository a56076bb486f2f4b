"""Which machine this is."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import psutil
import torch

from tiercache.profile import Machine


def this_machine() -> Machine:
    """The machine that this process runs on, as it may use it."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    name, memory_bytes, count = None, 0, 0
    if accelerator is not None:
        count = torch.accelerator.device_count()
        name = accelerator.type
        if accelerator.type == "cuda":
            properties = torch.cuda.get_device_properties(0)
            name, memory_bytes = properties.name, int(properties.total_memory)
    return Machine(
        processor=_processor(),
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        memory_bytes=int(psutil.virtual_memory().total),
        accelerator=name,
        num_accelerators=count,
        accelerator_bytes=memory_bytes,
    )


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
