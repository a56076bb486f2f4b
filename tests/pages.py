"""Small pages and stores for tests of the store."""

from __future__ import annotations

from typing import Any

import torch

from tiercache import PageKey, StoreConfig, TierStore
from tiercache.stats import Stats
from tiercache.testing import MemoryTier
from tiercache.tiers.base import Tier
from tiercache.tiers.device import DeviceTier

PAGE = 1024


def key(number: int, kind: str = "key", graph: int = 0) -> PageKey:
    return PageKey(number.to_bytes(4, "big") * 8, 0, kind, graph)


def grad(number: int, graph: int = 1) -> PageKey:
    return key(number, "grad_key", graph)


def page(value: float, num_bytes: int = PAGE) -> torch.Tensor:
    """An fp32 page of that many bytes."""
    return torch.full((num_bytes // 4,), float(value))


def is_page(tensor: torch.Tensor, value: float) -> bool:
    return bool((tensor == value).all())


def small_store(
    device: int = 4, host: int | Tier | None = 4, disk: int | Tier | None = 64, **options: Any
) -> TierStore:
    """A store over budgets counted in pages; host and disk are kept in plain memory."""
    tiers: list[Tier] = [DeviceTier(device * PAGE)]
    if isinstance(host, int):
        host = MemoryTier(host * PAGE, name="host")
    if isinstance(disk, int):
        disk = MemoryTier(disk * PAGE, name="disk")
    tiers += [tier for tier in (host, disk) if tier is not None]
    clock = options.pop("clock", None)
    options.setdefault("timeout_s", 20.0)
    return TierStore(StoreConfig(device=device * PAGE, **options), tiers=tiers, clock=clock)


def check_budgets(store: TierStore) -> Stats:
    """The store's books agree and no tier, nor staging, ever held more than its budget."""
    store.check_integrity()
    stats = store.stats()
    for name, capacity in stats.bytes_capacity.items():
        assert stats.bytes_used[name] <= stats.bytes_peak[name] <= capacity
    assert stats.staging_used_bytes <= stats.staging_peak_bytes <= stats.staging_capacity_bytes
    return stats
