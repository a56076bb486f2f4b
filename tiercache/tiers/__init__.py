"""Places that keep bytes, each behind the contract of base.py. A new tier is one file and one row of the table."""

from __future__ import annotations

import importlib
from typing import Any

from tiercache.errors import ConfigError
from tiercache.tiers.base import ByteArray, PageMeta, Slot, Tier

__all__ = ["TIERS", "ByteArray", "PageMeta", "Slot", "Tier", "create_tier"]

TIERS: dict[str, tuple[str, str]] = {
    "device": ("tiercache.tiers.device", "DeviceTier"),
    "host": ("tiercache.tiers.host", "HostTier"),
    "disk": ("tiercache.tiers.disk", "DiskTier"),
}
"""Name -> module and class; imported when first created, for some bring the native core along."""


def create_tier(name: str, /, *args: Any, **params: Any) -> Tier:
    """The tier of this name, made with its own arguments. Raises ConfigError for a name that is none."""
    if name not in TIERS:
        raise ConfigError("create_tier: name", got=name, limit=", ".join(TIERS))
    module, cls = TIERS[name]
    tier: Tier = getattr(importlib.import_module(module), cls)(*args, **params)
    return tier
