"""What a step did."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


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
        stall_s: seconds in which a read had to wait.
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
    gradient_sum_bytes: int = 0
    duplicated_tokens: int = 0

    @contextmanager
    def timed(self, kind: str) -> Iterator[None]:
        """Adds the time of a block to `seconds[kind]`."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[kind] = self.seconds.get(kind, 0.0) + time.perf_counter() - begin

    def as_dict(self) -> dict[str, object]:
        """For JSON."""
        return dataclasses.asdict(self)
