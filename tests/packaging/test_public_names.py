"""The public names of each room. One that comes or goes is a decision: say so in the changelog."""

from __future__ import annotations

import tiercache

PUBLIC = [
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
RUNTIME = ["BranchReplay", "ParityReport", "Row", "StepReport", "offload", "prefix_attention", "verify"]


def test_the_runtime_has_these_names_and_no_others() -> None:
    assert tiercache.runtime.__all__ == RUNTIME
    for name in RUNTIME:
        assert getattr(tiercache.runtime, name) is not None


def test_the_front_door_has_these_names_and_no_others() -> None:
    assert tiercache.__all__ == PUBLIC
    assert dir(tiercache) == PUBLIC
    assert len([name for name in PUBLIC if not name.startswith("_")]) <= 12
    for name in PUBLIC:
        assert getattr(tiercache, name) is not None
