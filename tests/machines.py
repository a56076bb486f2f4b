"""Speeds of machines that tests make up."""

from __future__ import annotations

from dataclasses import replace

from tiercache.profile import ComputeSpeed, Profile, TierSpeed
from tiercache.usual import usual_profile


def slow_machine(**bytes_per_s: float) -> Profile:
    """A machine whose arithmetic is so slow that even tiny nodes are worth keeping; tiers at these speeds."""
    usual = usual_profile(accelerator=False)
    slow = ComputeSpeed(matmul_flops_per_s=1e5, attention_flops_per_s=1e5, attention_backward_flops_per_s=1e5)
    tiers = {
        name: TierSpeed(read_bytes_per_s=speed, write_bytes_per_s=speed)
        for name, speed in bytes_per_s.items()
    }
    return replace(usual, compute={"float32": slow}, tiers=dict(usual.tiers) | tiers)
