"""Parts of the engine's loop that call no hook: compiled once for all policies."""

from __future__ import annotations

from typing import Any

from tiercache.policies.base import (
    ADMISSION,
    ADMISSION_LIMIT,
    ADMIT_CLOCK,
    EMIT,
    EVENTS,
    FLAGS,
    GET,
    INCOMING,
    LOOKUP_AT,
    NOW,
    PUT,
    REFUSED,
    REFUSED_BYTES,
    compiled,
)

SECOND_HIT, SIZE_LIMIT, GHOST = 1, 2, 3


@compiled
def emit(M: Any, E: Any, op: int, k: int, size: int, cost: float) -> None:
    """Appends an event for the next tier; its `next_use` is the time of the event."""
    n = M[EVENTS]
    E[n].id = k
    E[n].op = op
    E[n].size = size
    E[n].cost = cost
    E[n].next_use = M[NOW]
    M[EVENTS] = n + 1


@compiled
def refuse(R: Any, M: Any, E: Any, op: int, k: int) -> int:
    """The missed entry k stays out. A lookup of it below then leaves it there; a PUT goes further down."""
    M[INCOMING] = -1
    M[REFUSED] += 1
    M[REFUSED_BYTES] += R[k].size
    if M[FLAGS] & EMIT:
        if op == PUT:
            emit(M, E, PUT, k, R[k].size, R[k].cost)
        else:
            E[M[LOOKUP_AT]].op = GET
    return 0


@compiled
def admitted(R: Any, M: Any, k: int, size: int) -> bool:
    """Whether admission lets the missed entry k in. `seen` is its memory of k."""
    kind = M[ADMISSION]
    if kind == SECOND_HIT:
        R[k].seen += 1
        return R[k].seen >= M[ADMISSION_LIMIT]
    if kind == SIZE_LIMIT:
        return size <= M[ADMISSION_LIMIT]
    # GHOST: `seen` is the clock of missed bytes, in 1024ths of the limit or bytes, at k's last miss.
    M[ADMIT_CLOCK] += size
    unit = M[ADMISSION_LIMIT] // 1024 + 1
    tick = M[ADMIT_CLOCK] // unit + 1
    before = R[k].seen
    R[k].seen = tick
    return before > 0 and tick - before <= M[ADMISSION_LIMIT] // unit
