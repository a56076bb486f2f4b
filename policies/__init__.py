"""Eviction policies: the same compiled hooks in the store and in the simulator.

`create_policy` is the store's door, `POLICIES` the table of names. Importing compiles nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from tiercache.errors import PolicyError

if TYPE_CHECKING:
    from tiercache.policies.engine import Hooks, OnlinePolicy

POLICIES: dict[str, tuple[str, dict[str, Any]]] = {
    "fifo": ("fifo", {}),
    "lru": ("lru", {}),
    "clock": ("clock", {}),
    "sieve": ("sieve", {}),
    "lfu": ("lfu", {}),
    "slru": ("slru", {}),
    "2q": ("twoq", {}),
    "arc": ("arc", {}),
    "s3fifo": ("s3fifo", {}),
    "s3fifo_2023": ("s3fifo", {"current": False}),
    "lirs": ("lirs", {}),
    "gdsf": ("gdsf", {}),
    "wtinylfu": ("wtinylfu", {}),
    "belady": ("belady", {}),
    "belady_bypass": ("belady", {"bypass": True}),
    "planned": ("planned", {}),
}
"""Name -> file of hooks and the parameters that make the variant."""


def load_hooks(name: str) -> tuple[Hooks, dict[str, Any]]:
    """A policy's hooks and its variant's parameters, by name. Raises PolicyError for an unknown one."""
    from tiercache.policies.engine import Hooks

    if name not in POLICIES:
        raise PolicyError(f"policy {name!r} is unknown", limit=", ".join(POLICIES))
    file, params = POLICIES[name]
    return Hooks(file, importlib.import_module(f"tiercache.policies.{file}")), params


def create_policy(name: str, *, capacity_bytes: int, max_entries: int = 1024, **params: Any) -> OnlinePolicy:
    """A policy for one tier of a store.

    Args:
        name: one of `POLICIES`.
        capacity_bytes: budget of the tier.
        max_entries: expected number of pages; it grows.
        params: the policy's parameters, as its file documents them.

    Raises:
        PolicyError: unknown name, parameter or a wrong value.
    """
    from tiercache.policies.engine import OnlinePolicy

    hooks, defaults = load_hooks(name)
    return OnlinePolicy(
        hooks, capacity_bytes=capacity_bytes, max_entries=max_entries, **{**defaults, **params}
    )


__all__ = ["POLICIES", "create_policy", "load_hooks"]
