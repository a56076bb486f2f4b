"""A whole profile of this machine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from tiercache.measure.arithmetic import (
    AttentionKernels,
    measure_compute,
    measure_fresh,
    measure_op,
    measure_stream,
    product,
)
from tiercache.measure.codecs import measure_codecs
from tiercache.measure.copies import measure_arena, measure_link, measure_memory
from tiercache.measure.drives import measure_drives
from tiercache.measure.first_touch import touch_memory
from tiercache.measure.machine import this_machine
from tiercache.measure.timing import Budget
from tiercache.profile import Profile, TierSpeed, dtype_name

_TOUCHED_BYTES = 1 << 30
_CPU = torch.device("cpu")


def measure_profile(
    kernels: AttentionKernels,
    *,
    directories: Sequence[Path] = (),
    dtypes: Sequence[torch.dtype] = (torch.bfloat16, torch.float32),
    budget: Budget | None = None,
    progress: Callable[[str], None] | None = None,
) -> Profile:
    """Measures arithmetic, memory, the arena, each drive and each codec, alone and beside arithmetic.

    Args:
        kernels: the attention whose speed counts.
        directories: of the disk tier, a drive each; without any there are no figures of a disk.
        dtypes: of the arithmetic; the first is what the others run beside.
        budget: of each figure.
        progress: called with the name of what is measured next.

    Raises:
        TierIOError, TierFullError, StoreLockedError: a directory cannot be used; nothing is left in it.
    """
    budget = budget or Budget()
    say = progress or _say_nothing
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    device = accelerator if accelerator is not None else _CPU
    say("memory at its first touch")
    touch_memory(_TOUCHED_BYTES)
    say("arithmetic")
    compute = {dtype_name(dtype): measure_compute(device, dtype, budget, kernels) for dtype in dtypes}
    arithmetic, _ = product(device, dtypes[0])
    stream, op_s = measure_stream(device, budget), measure_op(device, budget)
    say("memory")
    parts = {
        "host memory": measure_memory(_CPU, arithmetic, budget),
        "arena": measure_arena(arithmetic, budget),
    }
    tiers = {"host": parts["arena"]}
    if accelerator is not None:
        parts["device memory"] = measure_memory(device, arithmetic, budget)
        tiers["host"] = measure_link(device, arithmetic, budget)
    for directory in directories:
        say(f"drive {directory}")
        parts[f"drive {directory}"] = measure_drives([directory], arithmetic, budget)
    if directories:
        tiers["disk"] = _disk(directories, parts, lambda: measure_drives(directories, arithmetic, budget))
    say("codecs")
    return Profile(
        machine=this_machine(),
        tiers=tiers,
        parts=parts,
        codecs=measure_codecs(arithmetic, budget),
        compute=compute,
        memory_bytes_per_s=stream,
        op_s=op_s,
        fresh_s_per_byte=measure_fresh(device, budget),
    )


def _say_nothing(text: str) -> None:
    del text


def _disk(
    directories: Sequence[Path], parts: dict[str, TierSpeed], together: Callable[[], TierSpeed]
) -> TierSpeed:
    return parts[f"drive {directories[0]}"] if len(directories) == 1 else together()
