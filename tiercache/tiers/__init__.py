"""Places that keep bytes, each behind the contract of base.py."""

from __future__ import annotations

from typing import Any

from tiercache.errors import ConfigError
from tiercache.tiers.base import ByteArray, PageMeta, Slot, Tier
from tiercache.tiers.disk import DiskTier
from tiercache.tiers.host import HostTier

__all__ = ["ByteArray", "DiskTier", "HostTier", "PageMeta", "Slot", "Tier", "create_tier"]

_TIERS: dict[str, type[HostTier | DiskTier]] = {"host": HostTier, "disk": DiskTier}


def create_tier(name: str, /, *args: Any, **params: Any) -> Tier:
    """The tier of this name, made with its own arguments. Raises ConfigError for a name that is none."""
    try:
        made = _TIERS[name]
    except KeyError:
        raise ConfigError("create_tier: name", got=name, limit=", ".join(_TIERS)) from None
    return made(*args, **params)
