"""A profile in under a second, for choices that cannot wait for a whole one."""

from __future__ import annotations

from dataclasses import replace

import torch

from tiercache.measure.arithmetic import (
    AttentionKernels,
    measure_compute,
    measure_fresh,
    measure_op,
    measure_stream,
)
from tiercache.measure.machine import this_machine
from tiercache.measure.timing import Budget
from tiercache.profile import Profile, dtype_name
from tiercache.usual import usual_profile

_BUDGET = Budget(seconds=0.05, min_repeats=3)


def measure_quickly(device: torch.device, dtype: torch.dtype, kernels: AttentionKernels) -> Profile:
    """The usual machine's tiers and codecs, with this device's arithmetic in this dtype.

    On the host a copy between tiers is a copy in memory, so its speed is measured with the elementwise work's.
    """
    usual = usual_profile(accelerator=device.type != "cpu")
    stream = measure_stream(device, _BUDGET)
    tiers = dict(usual.tiers)
    if device.type == "cpu":
        tiers["host"] = replace(tiers["host"], read_bytes_per_s=stream / 2, write_bytes_per_s=stream / 2)
    return replace(
        usual,
        machine=this_machine(),
        tiers=tiers,
        compute=dict(usual.compute) | {dtype_name(dtype): measure_compute(device, dtype, _BUDGET, kernels)},
        memory_bytes_per_s=stream,
        op_s=measure_op(device, _BUDGET),
        fresh_s_per_byte=measure_fresh(device, _BUDGET),
    )
