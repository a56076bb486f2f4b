"""The tiers that a store's options describe."""

from __future__ import annotations

from tiercache.config import StoreConfig, parse_size
from tiercache.tiers import Tier, create_tier


def create_tiers(config: StoreConfig, *, pin: bool) -> list[Tier]:
    """Tiers from the device down; `pin` page-locks host memory. After an error none is left open."""
    tiers = [create_tier("device", config.device_bytes)]
    try:
        if isinstance(config.host, Tier):
            tiers.append(config.host)
        elif config.host is not None and parse_size(config.host, "host") > 0:
            tiers.append(create_tier("host", parse_size(config.host, "host"), pin=pin))
        if isinstance(config.disk, Tier):
            tiers.append(config.disk)
        elif config.disk_directories:
            assert config.disk_capacity is not None
            capacity_bytes = parse_size(config.disk_capacity, "disk_capacity")
            options = {"timeout_s": config.timeout_s, "durability": config.durability}
            tiers.append(create_tier("disk", config.disk_directories, capacity_bytes, **options))
    except BaseException:
        for tier in tiers:
            tier.close()
        raise
    return tiers


def io_of(tiers: list[Tier]) -> str:
    """How the disk tier reaches its drives, such as "io_uring"; "" without one."""
    stats = getattr(tiers[-1], "stats", None)
    if tiers[-1].name != "disk" or stats is None:
        return ""
    return ", ".join(sorted({str(drive["rung"]) for drive in stats()["drives"]}))
