"""The access plan: the page reads and writes that a schedule will make, in order."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from tiercache.entry import PageKey

Operation = Literal["put", "read", "accumulate", "take", "discard"]


@dataclass(frozen=True, slots=True)
class Access:
    """One call that the schedule will make of the store. `num_bytes` is the page's logical size."""

    operation: Operation
    key: PageKey
    num_bytes: int = 0


@dataclass(slots=True)
class AccessPlan:
    """The known future: accesses in the order in which they will be made."""

    accesses: list[Access] = field(default_factory=list)

    def add(self, operation: Operation, key: PageKey, num_bytes: int = 0) -> None:
        """Appends one access."""
        self.accesses.append(Access(operation, key, num_bytes))

    def __len__(self) -> int:
        return len(self.accesses)
