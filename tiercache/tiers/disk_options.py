"""Options of the disk tier."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

from tiercache.errors import ConfigError

Durability = Literal["scratch", "process", "power"]
Engine = Literal["auto", "io_uring", "threads"]


@dataclass(frozen=True, kw_only=True)
class DiskOptions:
    """How a disk tier works.

    Attributes:
        durability: "scratch": nothing outlives this process. "process": persistent records outlive a killed process
            once `flush` returned, or 20 ms after the write. "power": they outlive a power cut as well.
        engine: "auto" takes io_uring where it works, else threads; naming one insists on it.
        direct: offer O_DIRECT; it is used where it works.
        depth: operations in flight on one drive.
        threads: of one drive, for the engine "threads".
        bounce_buffers: 1 MiB each, as many for reads as for writes, for memory that is not 4 KiB aligned.
        timeout_s: deadline of one read or write.
        segment_bytes: size of a segment file; None: a 64th of the budget within 16 to 512 MiB.
        max_errors: I/O errors after which a drive takes no more records.
        faults: builds the fault-injecting engine in: `DiskTier.core.add_fault`.
        log: builds the write log in: `DiskTier.core.take_log`.
        rebuild: throws the index away and makes it anew from the segments; called with segments read and in all.
    """

    durability: Durability = "scratch"
    engine: Engine = "auto"
    direct: bool = True
    depth: int = 16
    threads: int = 4
    bounce_buffers: int = 8
    timeout_s: float = 60.0
    segment_bytes: int | None = None
    max_errors: int = 8
    faults: bool = False
    log: bool = False
    rebuild: Callable[[int, int], None] | None = None

    def __post_init__(self) -> None:
        for field, allowed in (("durability", get_args(Durability)), ("engine", get_args(Engine))):
            if getattr(self, field) not in allowed:
                limit = ", ".join(allowed)
                raise ConfigError(f"disk tier: {field}", got=getattr(self, field), limit=limit)
        for field in ("depth", "threads", "bounce_buffers", "max_errors"):
            if not 1 <= getattr(self, field) <= 1024:
                raise ConfigError(f"disk tier: {field}", got=getattr(self, field), limit="1 to 1024")
        if self.timeout_s <= 0:
            raise ConfigError("disk tier: timeout_s", got=self.timeout_s, limit="more than 0")

    def for_core(self) -> dict[str, Any]:
        """Keyword arguments of the native core."""
        options = asdict(self)
        del options["rebuild"]
        return {**options, "segment_bytes": self.segment_bytes or 0}
