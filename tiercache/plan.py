"""The access plan: the page reads and writes that a schedule will make, in order."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from tiercache.entry import PageKey

Operation = Literal["put", "read", "accumulate", "take", "discard"]


@dataclass(frozen=True, slots=True)
class Access:
    """One call that the schedule will make of the store.

    Attributes:
        operation: which.
        key: of the page.
        num_bytes: the page's logical size.
        recompute_s: of a put: seconds to compute the page again where its `take` finds nothing; None if it must
            be kept.
    """

    operation: Operation
    key: PageKey
    num_bytes: int = 0
    recompute_s: float | None = None


@dataclass(slots=True)
class AccessPlan:
    """The known future: accesses in the order in which they will be made."""

    accesses: list[Access] = field(default_factory=list)

    def add(
        self, operation: Operation, key: PageKey, num_bytes: int = 0, recompute_s: float | None = None
    ) -> None:
        """Appends one access."""
        self.accesses.append(Access(operation, key, num_bytes, recompute_s))

    def live_bytes(self) -> list[int]:
        """Bytes of the pages that must be kept after each access.

        Pages that may be dropped don't count, nor the tensors of whole graphs, whose sizes are known only once they are
        there.
        """
        live: dict[PageKey, int] = {}
        total, after = 0, []
        for access in self.accesses:
            if access.operation in ("put", "accumulate"):
                must = access.recompute_s is None and access.key.kind != "saved_tensor"
                if must and access.key not in live:
                    live[access.key] = access.num_bytes
                    total += access.num_bytes
            elif access.operation != "read":
                total -= live.pop(access.key, 0)
            after.append(total)
        return after

    def __len__(self) -> int:
        return len(self.accesses)
