"""Room of tiers, from the device down, and what it costs to lie there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tiercache.profile import Profile

_DOUBT = (
    1.25  # speeds of copies beside compute are known to about a quarter: what is kept should pay for sure
)
_TIER_SHARE = (0.75, 0.9, 0.9)  # of each tier; the rest is for what is on its way and what tails bring up


@dataclass(frozen=True, slots=True)
class Room:
    """A tier as the choice sees it.

    Attributes:
        name: of the tier.
        free_bytes: of it.
        speed_s_per_byte: to bring a byte down and up again; 0 on the device.
        compute_share: share of its speed that arithmetic keeps meanwhile.
    """

    name: str
    free_bytes: int
    speed_s_per_byte: float = 0.0
    compute_share: float = 1.0


def price_of_room(begin: int, end: int, rooms: Sequence[Room], hidden_s: float) -> tuple[float, str] | None:
    """Seconds that bytes `begin`..`end` of a load cost where they lie, and the lowest tier; None: they don't fit."""
    price_s, floor, where = 0.0, 0.0, ""
    for room, share in zip(rooms, _TIER_SHARE, strict=False):
        ceiling = floor + share * room.free_bytes
        here = max(0.0, min(end, ceiling) - max(begin, floor))
        if here > 0 or not where:
            copy_s = here * room.speed_s_per_byte
            price_s += _DOUBT * (copy_s * (1.0 - room.compute_share) + max(0.0, copy_s - hidden_s))
            where = room.name
        floor = ceiling
    return None if end > floor else (price_s, where)


def rooms_of(free_bytes: dict[str, int], profile: Profile) -> list[Room]:
    """Tiers, from the device down, at a profile's speeds."""
    rooms: list[Room] = []
    for name, free in free_bytes.items():
        if not rooms:
            rooms.append(Room(name, free))
            continue
        speed = profile.tier(name)
        each = 1.0 / speed.read_bytes_per_s + 1.0 / speed.write_bytes_per_s
        rooms.append(Room(name, free, each / speed.beside_compute, speed.compute_share))
    return rooms
