"""What a store did: bytes per tier, traffic, hits, and the seconds that reads had to wait."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(slots=True)
class Stats:
    """Counters of one store since it was opened. A copy: it does not change after `stats()` returned it.

    Attributes:
        bytes_used: bytes in use now, by tier, transfers in flight included.
        bytes_kept: bytes on disk of persistent pages that nobody holds; they give way when room is needed.
        bytes_peak: most bytes in use at any instant, by tier.
        bytes_capacity: budgets, by tier.
        staging_used_bytes, staging_peak_bytes, staging_capacity_bytes: the same of the host memory for what is on
            its way between tiers.
        bytes_moved: traffic by direction, as in "device->host".
        pages: pages that exist now.
        hits: reads that found their page on the device.
        misses: reads that had to bring their page up themselves or wait for it.
        stall_s: seconds that reads and takes waited for their page.
        put_stall_s: seconds that puts and sums waited, for room or for a sum to come up.
        prefetches: pages brought up ahead of use.
        prefetches_used: of those, pages that were then read.
        deviations: accesses that were not the next one of the plan that is followed.
        evictions: copies removed from a tier to make room.
        dropped: pages that had to give room and were forgotten, for computing them again takes less than their reload.
        demotion_errors: transfers down that failed; their pages stayed where they were.
        uncoded: times that a page went down as raw bytes because staging was too small for its codec.
        lost_pages: pages whose only record failed its proof.
        io: what the disk tier uses ("io_uring", "threads", "buffered"), "" without one.
    """

    bytes_used: dict[str, int] = field(default_factory=dict)
    bytes_peak: dict[str, int] = field(default_factory=dict)
    bytes_capacity: dict[str, int] = field(default_factory=dict)
    staging_used_bytes: int = 0
    staging_peak_bytes: int = 0
    staging_capacity_bytes: int = 0
    bytes_moved: dict[str, int] = field(default_factory=dict)
    bytes_kept: int = 0
    pages: int = 0
    puts: int = 0
    reads: int = 0
    hits: int = 0
    misses: int = 0
    stall_s: float = 0.0
    put_stall_s: float = 0.0
    prefetches: int = 0
    prefetches_used: int = 0
    deviations: int = 0
    evictions: int = 0
    dropped: int = 0
    demotion_errors: int = 0
    uncoded: int = 0
    lost_pages: int = 0
    io: str = ""

    def as_dict(self) -> dict[str, Any]:
        """All counters as plain numbers, text and dicts, ready for JSON."""
        return asdict(self)
