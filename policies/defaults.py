"""The optional hooks' defaults; the others stand in until a policy's own are put in their place."""

from __future__ import annotations

from typing import Any

from tiercache.policies.base import unlink


def on_insert(R: Any, M: Any, F: Any, k: int, now: int) -> None:
    """Stands in."""


def on_hit(R: Any, M: Any, F: Any, k: int, now: int) -> None:
    """Stands in."""


def on_evict(R: Any, M: Any, F: Any, k: int, now: int, to_tier: int) -> None:
    """Stands in."""


def victim(R: Any, M: Any, F: Any, now: int) -> int:
    """Stands in."""
    return -1


def on_miss(R: Any, M: Any, F: Any, k: int, now: int) -> None:
    """By default nothing is done before a miss."""


def admit(R: Any, M: Any, F: Any, k: int, now: int) -> bool:
    """By default everything is admitted."""
    return True


def on_remove(R: Any, M: Any, F: Any, k: int, now: int) -> None:
    """By default a removal is an eviction to nowhere, and no ghost stays."""
    if R[k].resident:
        on_evict(R, M, F, k, now, -1)
    if R[k].where > 0:
        unlink(R, M, k)


def on_next_use(R: Any, M: Any, F: Any, k: int, when: int, now: int) -> None:
    """By default a known next use changes nothing."""


def on_advance(R: Any, M: Any, F: Any, now: int) -> None:
    """By default time changes nothing."""


def on_chosen(R: Any, M: Any, F: Any, now: int) -> None:
    """By default nothing was put aside."""


def on_resize(R: Any, M: Any, F: Any, k: int, delta: int) -> None:
    """By default another size changes nothing but the books."""
