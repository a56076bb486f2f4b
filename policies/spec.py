"""What a simulation is told of a tier, and what it counts there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from tiercache.policies.errors import PolicyError

Admission = Literal["always", "second_hit", "size", "ghost"]
ADMISSIONS: dict[str, int] = {"always": 0, "second_hit": 1, "size": 2, "ghost": 3}


def admission_limit_of(admission: str, limit: int | None, capacity_bytes: int, what: str) -> int:
    """The limit that an admission goes by: `limit` or its default. Raises PolicyError for what cannot be meant."""
    if admission not in ADMISSIONS:
        raise PolicyError(f"{what}: admission", got=admission, limit=", ".join(ADMISSIONS))
    if admission == "size" and limit is None:
        raise PolicyError(f"{what}: admission by size needs admission_limit, in bytes")
    if admission == "always" and limit is not None:
        raise PolicyError(f"{what}: admission_limit has no effect with admission always")
    if limit is not None and limit < 1:
        raise PolicyError(f"{what}: admission_limit", got=limit, limit=">= 1")
    if limit is not None:
        return limit
    return capacity_bytes if admission == "ghost" else 2


@dataclass(frozen=True, kw_only=True)
class Tier:
    """One tier of a simulation.

    Attributes:
        capacity_bytes: budget.
        policy: name, or path of a user's file.
        params: the policy's parameters.
        admission: which missed pages may enter: "always"; "second_hit": those missed `admission_limit` times (2);
            "size": of at most `admission_limit` bytes; "ghost": missed again before `admission_limit` bytes (the
            capacity) were missed.
        admission_limit: see there.
        latency_s: seconds before the first byte read from this tier arrives.
        bytes_per_s: speed of reads from this tier.
        name: for tables.
    """

    capacity_bytes: int
    policy: str = "lru"
    params: Mapping[str, Any] = field(default_factory=dict)
    admission: Admission = "always"
    admission_limit: int | None = None
    latency_s: float = 0.0
    bytes_per_s: float = float("inf")
    name: str = "cache"

    def __post_init__(self) -> None:
        if self.capacity_bytes <= 0:
            raise PolicyError(f"tier {self.name}: capacity_bytes must be positive", got=self.capacity_bytes)
        admission_limit_of(self.admission, self.admission_limit, self.capacity_bytes, f"tier {self.name}")


@dataclass(frozen=True, slots=True)
class Counts:
    """What a tier counted after the warm-up; bytes and seconds beside numbers of requests."""

    hits: int
    misses: int
    hit_bytes: int
    miss_bytes: int
    hit_cost_s: float
    miss_cost_s: float
    inserts: int
    inserted_bytes: int
    evictions: int
    evicted_bytes: int
    refused: int
    refused_bytes: int

    @property
    def miss_ratio(self) -> float:
        """Misses per request."""
        return self.misses / max(self.hits + self.misses, 1)

    @property
    def byte_miss_ratio(self) -> float:
        """Missed bytes per requested byte."""
        return self.miss_bytes / max(self.hit_bytes + self.miss_bytes, 1)

    @property
    def cost_miss_ratio(self) -> float:
        """Seconds of reloads per second that no cache would take."""
        total = self.hit_cost_s + self.miss_cost_s
        return self.miss_cost_s / total if total > 0 else 0.0
