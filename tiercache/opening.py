"""The tiers that a store's options describe."""

from __future__ import annotations

from collections.abc import Sequence

from tiercache.config import StoreConfig, parse_size
from tiercache.errors import ConfigError
from tiercache.tiers import Tier, create_tier
from tiercache.tiers.host import HostTier

# Of host memory, the share that is set aside for what is on its way, and the most of it by default.
_STAGING_SHARE = 8
_STAGING_BYTES = 256 << 20
_BLOCK = 4096


def create_tiers(config: StoreConfig, *, pin: bool) -> list[Tier]:
    """Tiers from the device down; `pin` page-locks host memory. After an error none is left open."""
    tiers = [create_tier("device", config.device_bytes)]
    try:
        if isinstance(config.host, Tier):
            tiers.append(config.host)
        elif config.host is not None and parse_size(config.host, "host") > 0:
            tiers.append(_create_host(config, parse_size(config.host, "host"), pin=pin))
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


def _create_host(config: StoreConfig, budget_bytes: int, *, pin: bool) -> Tier:
    """The host tier, of whose budget a part is staging."""
    staging = config.staging_bytes
    if staging is None:
        staging = max(_BLOCK, min(budget_bytes // _STAGING_SHARE, _STAGING_BYTES))
    if budget_bytes < staging + _BLOCK:
        raise ConfigError(
            "host: too small for one page and the staging that is set aside",
            got=budget_bytes,
            limit=f"{staging + _BLOCK} or more",
            remedy="raise host, or leave it out",
        )
    return create_tier("host", budget_bytes - staging, staging_bytes=staging, pin=pin)


def create_staging(config: StoreConfig, tiers: Sequence[Tier], *, pin: bool) -> HostTier:
    """The tier whose staging part is used: the host tier, or one that has nothing else."""
    for tier in tiers:
        if isinstance(tier, HostTier) and tier.stats().staging_bytes:
            return tier
    staging = config.staging_bytes
    if staging is None:
        staging = max(_BLOCK, min(config.device_bytes, _STAGING_BYTES))
    return HostTier(_BLOCK, staging_bytes=staging, pin=pin)


def io_of(tiers: list[Tier]) -> str:
    """How the disk tier reaches its drives, such as "io_uring"; "" without one."""
    stats = getattr(tiers[-1], "stats", None)
    if tiers[-1].name != "disk" or stats is None:
        return ""
    return ", ".join(sorted({str(drive["rung"]) for drive in stats()["drives"]}))
