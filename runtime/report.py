"""What a step did."""

from __future__ import annotations

import copy
import dataclasses
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from tiercache.plan import AccessPlan
from tiercache.runtime.least_traffic import least_bytes_up


@dataclass(slots=True)
class StepReport:
    """What a step did.

    Attributes:
        loss: sum of the rows' losses; NaN for `logprobs`, whose loss is the caller's.
        num_rows: rows of the batch.
        num_nodes: captured nodes.
        dense_tokens: tokens of all rows, what dense training would run.
        captured_tokens: tokens of captured nodes.
        tail_tokens: tokens of leaves.
        kept: captured nodes by what they left for their pop, as in `prefix_activations`.
        reasons: why, of the last node of each.
        seconds: wall time by visit kind, and of "total".
        stall_s: seconds in which a read or take had to wait for its page.
        put_stall_s: seconds in which puts and sums had to wait, for room or for a sum to come up.
        bytes_moved: traffic of the step by direction, as in "device->host".
        bytes_peak: most bytes in use in each tier since the store was opened.
        hits, reads: reads of pages, and those that found theirs on the device.
        deviations: accesses that were not the plan's next one.
        gradient_sum_bytes: most bytes of parameter-gradient sums held at once.
        duplicated_tokens: captured on more ranks than one, each but the first counted; 0 in one process.
    """

    loss: float = float("nan")
    num_rows: int = 0
    num_nodes: int = 0
    dense_tokens: int = 0
    captured_tokens: int = 0
    tail_tokens: int = 0
    kept: dict[str, int] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    stall_s: float = 0.0
    put_stall_s: float = 0.0
    bytes_moved: dict[str, int] = field(default_factory=dict)
    bytes_peak: dict[str, int] = field(default_factory=dict)
    hits: int = 0
    reads: int = 0
    deviations: int = 0
    gradient_sum_bytes: int = 0
    duplicated_tokens: int = 0
    _plans: list[AccessPlan] = field(default_factory=list, repr=False, compare=False)
    _device_bytes: int = field(default=0, repr=False, compare=False)

    @property
    def tokens_run(self) -> int:
        """Tokens of captured nodes and of leaves, each counted once."""
        return self.captured_tokens + self.tail_tokens

    @property
    def tokens_saved(self) -> int:
        """Tokens that dense training would run beside them."""
        return self.dense_tokens - self.tokens_run

    @property
    def bytes_up(self) -> int:
        """Bytes that came up to the device."""
        return sum(n for direction, n in self.bytes_moved.items() if direction.endswith("->device"))

    def bound_bytes(self) -> int:
        """Least bytes that the step's reads can bring up to the device, whatever is evicted when.

        A lower bound (PFOO-L of the access plan), worked out when it is asked for; 0 without a plan.
        """
        return sum(least_bytes_up(plan, self._device_bytes) for plan in self._plans)

    def regret_bytes(self) -> int:
        """Bytes that came up beyond the bound."""
        return self.bytes_up - self.bound_bytes()

    def follow(self, plan: AccessPlan) -> None:
        """Remembers the plan of a walk, for the bound."""
        self._plans.append(plan)

    @contextmanager
    def watching(self, store: Any) -> Iterator[None]:
        """Adds what a `TierStore` does inside the block."""
        before = store.stats()
        try:
            yield
        finally:
            after = store.stats()
            for name in ("stall_s", "put_stall_s", "hits", "reads", "deviations"):
                grown = getattr(self, name) + getattr(after, name) - getattr(before, name)
                setattr(self, name, grown)
            for direction, num_bytes in after.bytes_moved.items():
                moved = num_bytes - before.bytes_moved.get(direction, 0)
                if moved:
                    self.bytes_moved[direction] = self.bytes_moved.get(direction, 0) + moved
            self.bytes_peak = dict(after.bytes_peak)
            self._device_bytes = next(iter(after.bytes_capacity.values()), 0)

    @contextmanager
    def timed(self, kind: str) -> Iterator[None]:
        """Adds the time of a block to `seconds[kind]`."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[kind] = self.seconds.get(kind, 0.0) + time.perf_counter() - begin

    def as_dict(self) -> dict[str, object]:
        """For JSON; the bound aside, which takes time to work out."""
        shown = [f.name for f in dataclasses.fields(self) if not f.name.startswith("_")]
        found: dict[str, object] = {name: copy.copy(getattr(self, name)) for name in shown}
        return found | {"tokens_run": self.tokens_run, "tokens_saved": self.tokens_saved}

    def __rich__(self) -> Any:
        """One screen for rich's console: `rich.print(report)`."""
        from tiercache.runtime.report_table import report_screen

        return report_screen(self)
