"""Copies in memory: the device's own, the host's own, through the arena, and between device and host."""

from __future__ import annotations

import numpy as np
import torch

from tiercache.clock import Clock
from tiercache.entry import PageKey
from tiercache.measure.arithmetic import finished
from tiercache.measure.timing import Budget, Work, beside, time_of
from tiercache.profile import TierSpeed
from tiercache.streams import Engines
from tiercache.tiers.base import PageMeta, Tier
from tiercache.tiers.host import HostTier

PAGE_BYTES = 16 << 20
SMALL_BYTES = 4096


def page_meta(num_bytes: int, name: bytes = b"p") -> PageMeta:
    """The record of a page of raw bytes."""
    digest = PageKey(name * 32, 0, "key").digest
    return PageMeta(digest, bytes(32), "uint8", (num_bytes,), "raw", num_bytes, num_bytes)


def speed_of(
    large: tuple[Work, Work], small: tuple[Work, Work], num_bytes: int, arithmetic: Work, budget: Budget
) -> TierSpeed:
    """Speeds of (read, write), each returning when it is done, alone and beside arithmetic."""
    read_s, write_s = (time_of(work, budget) for work in large)
    kept, share = beside(large[0], arithmetic, budget)
    return TierSpeed(
        read_bytes_per_s=num_bytes / read_s,
        write_bytes_per_s=num_bytes / write_s,
        read_latency_s=time_of(small[0], budget),
        write_latency_s=time_of(small[1], budget),
        beside_compute=kept,
        compute_share=share,
    )


def measure_memory(device: torch.device, arithmetic: Work, budget: Budget) -> TierSpeed:
    """Copies from one place to another in the memory of one device."""
    wait = finished(device)

    def copies(num_bytes: int) -> Work:
        source = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        target = torch.empty_like(source)

        def run() -> None:
            target.copy_(source)
            wait()

        return run

    large, small = copies(PAGE_BYTES), copies(SMALL_BYTES)
    return speed_of((large, large), (small, small), PAGE_BYTES, arithmetic, budget)


def tier_works(tier: Tier, num_bytes: int) -> tuple[Work, Work]:
    """(read, write) of one page of a tier from and to ordinary memory; the slot ends with the tier."""
    slot, meta = tier.reserve(num_bytes), page_meta(num_bytes)
    data = np.full(num_bytes, 1, np.uint8)
    tier.write(slot, data, meta)
    spare = tier.reserve(num_bytes)
    return (lambda: tier.read(slot, data, meta)), (lambda: tier.write(spare, data, meta))


def measure_arena(arithmetic: Work, budget: Budget) -> TierSpeed:
    """Copies between ordinary memory and the host tier's arena."""
    tier = HostTier(3 * PAGE_BYTES)
    try:
        large, small = tier_works(tier, PAGE_BYTES), tier_works(tier, SMALL_BYTES)
        return speed_of(large, small, PAGE_BYTES, arithmetic, budget)
    finally:
        tier.close()


def measure_link(device: torch.device, arithmetic: Work, budget: Budget) -> TierSpeed:
    """Copies between an accelerator and the arena, on the streams that a store uses."""
    engine, clock = Engines(device).of(device), Clock()
    tier = HostTier(2 * PAGE_BYTES, pin=True)

    def works(num_bytes: int) -> tuple[Work, Work]:
        slot = tier.reserve(num_bytes)
        here = torch.from_numpy(tier.view(slot))
        there = torch.zeros(num_bytes, dtype=torch.uint8, device=device)

        def up() -> None:
            engine.finish(engine.to_device(here, there), clock.now() + 60, clock)

        def down() -> None:
            engine.finish(engine.to_host(there, here, None), clock.now() + 60, clock)

        return up, down

    try:
        large, small = works(PAGE_BYTES), works(SMALL_BYTES)
        return speed_of(large, small, PAGE_BYTES, arithmetic, budget)
    finally:
        tier.close()
