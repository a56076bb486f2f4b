"""tiercache: a store for training activations over device memory, host memory and disk.

Names are imported when they are first used: `import tiercache` itself costs nothing.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tiercache import errors, policies, runtime
    from tiercache.config import StoreConfig
    from tiercache.entry import PageKey
    from tiercache.errors import TierCacheError
    from tiercache.lease import Lease
    from tiercache.plan import AccessPlan
    from tiercache.stats import Stats
    from tiercache.store import TierStore, open_store

    __version__: str

__all__ = [
    "AccessPlan",
    "Lease",
    "PageKey",
    "Stats",
    "StoreConfig",
    "TierCacheError",
    "TierStore",
    "__version__",
    "errors",
    "open_store",
    "policies",
    "runtime",
]

_HOMES = {
    "AccessPlan": "tiercache.plan",
    "Lease": "tiercache.lease",
    "PageKey": "tiercache.entry",
    "Stats": "tiercache.stats",
    "StoreConfig": "tiercache.config",
    "TierCacheError": "tiercache.errors",
    "TierStore": "tiercache.store",
    "open_store": "tiercache.store",
}
_ROOMS = ("errors", "policies", "runtime")


def __getattr__(name: str) -> object:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    if name in _ROOMS:
        return importlib.import_module(f"tiercache.{name}")
    if name == "__version__":
        return importlib.metadata.version("tiercache")
    raise AttributeError(f"module 'tiercache' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
