"""tiercache: a store for training activations over device memory, host memory and disk."""

from tiercache.config import StoreConfig
from tiercache.entry import PageKey
from tiercache.errors import (
    ConfigError,
    PageMissingError,
    StoreTimeoutError,
    TierCacheError,
    TierFullError,
)
from tiercache.lease import Lease
from tiercache.plan import AccessPlan
from tiercache.stats import Stats
from tiercache.store import TierStore, open_store

__all__ = [
    "AccessPlan",
    "ConfigError",
    "Lease",
    "PageKey",
    "PageMissingError",
    "Stats",
    "StoreConfig",
    "StoreTimeoutError",
    "TierCacheError",
    "TierFullError",
    "TierStore",
    "open_store",
]
