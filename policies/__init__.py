"""Eviction policies: the same compiled hooks in the store and in the simulator.

`create_policy` is the store's door, `POLICIES` the table of names. Importing compiles nothing.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import sys
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tiercache.policies.errors import PolicyError

if TYPE_CHECKING:
    from tiercache.policies.compiler import Hooks
    from tiercache.policies.engine import OnlinePolicy

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
    """A policy's hooks and its variant's parameters, by name or by the path of a user's file (.py).

    Raises PolicyError for an unknown name, or a file that cannot be run.
    """
    from tiercache.policies.compiler import Hooks

    if name.endswith(".py"):
        return _load_file(Path(name)), {}
    if name not in POLICIES:
        raise PolicyError(
            f"policy {name!r} is unknown", limit=", ".join(POLICIES), remedy="or give a file of hooks"
        )
    file, params = POLICIES[name]
    return Hooks(file, importlib.import_module(f"tiercache.policies.{file}")), params


@lru_cache(maxsize=64)
def _load_file(path: Path) -> Hooks:
    from tiercache.policies.compiler import Hooks

    # numba's cache finds the hooks again by their module's name, so it must tell two files apart and be stable.
    place = hashlib.blake2b(str(path.absolute()).encode(), digest_size=6).hexdigest()
    spec = importlib.util.spec_from_file_location(f"tiercache_user_policy_{path.stem}_{place}", path)
    if spec is None or spec.loader is None:
        raise PolicyError(f"policy {path}: no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise PolicyError(f"policy {path}: the file does not run: {type(error).__name__}: {error}") from error
    return Hooks(path.stem, module, checked=True)


def create_policy(
    name: str,
    *,
    capacity_bytes: int,
    max_entries: int = 1024,
    admission: str = "always",
    admission_limit: int | None = None,
    **params: Any,
) -> OnlinePolicy:
    """A policy for one tier of a store.

    Args:
        name: one of `POLICIES`, or the path of a user's file.
        capacity_bytes: budget of the tier.
        max_entries: expected number of pages; it grows.
        admission: "always", "second_hit", "size" or "ghost"; see `policies.spec.Tier`.
        admission_limit: misses, bytes or missed bytes, by admission.
        params: the policy's parameters, as its file documents them.

    Raises:
        PolicyError: unknown name, parameter or a wrong value.
    """
    from tiercache.policies.engine import OnlinePolicy

    hooks, defaults = load_hooks(name)
    return OnlinePolicy(
        hooks,
        capacity_bytes=capacity_bytes,
        max_entries=max_entries,
        admission=admission,
        admission_limit=admission_limit,
        **{**defaults, **params},
    )


__all__ = ["POLICIES", "create_policy", "load_hooks"]
