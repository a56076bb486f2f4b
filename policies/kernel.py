"""The engine's loop, in plain functions. `engine.build` gives each policy a copy with its hooks put in.

The functions named like hooks below are the defaults of the optional ones and stand in for the others.
"""

from __future__ import annotations

from typing import Any

from tiercache.policies import base as b
from tiercache.policies.base import (
    ADMISSION,
    ADMISSION_LIMIT,
    CAPACITY,
    COST_FIXED,
    COST_HIT,
    COST_MISS,
    COST_PER_BYTE,
    COUNT,
    ERROR,
    ERROR_ID,
    EVENTS,
    EVICTED_BYTES,
    EVICTIONS,
    FLAGS,
    HIT_BYTES,
    HITS,
    INCOMING,
    LEASED,
    LISTS,
    MISS_BYTES,
    MISSES,
    NEVER,
    NOW,
    REFUSED,
    REFUSED_BYTES,
    ROUND,
    USED,
)

ATOMIC, EMIT = b.ATOMIC, b.EMIT
GET, PUT, REMOVE, LEASE, RELEASE, TAKE = b.GET, b.PUT, b.REMOVE, b.LEASE, b.RELEASE, b.TAKE
INSERT, HIT, VICTIMS, EVICT, NEXT_USE, RUN = b.INSERT, b.HIT, b.VICTIMS, b.EVICT, b.NEXT_USE, b.RUN
SECOND_HIT, SIZE_LIMIT, GHOST = 1, 2, 3
BAD_VICTIM, NO_VICTIM, BAD_ID, BAD_SIZE, NOT_RESIDENT, BAD_RELEASE = range(1, 7)


def on_insert(R: Any, M: Any, F: Any, k: int, now: int) -> None:
    """Stands in."""


def on_hit(R: Any, M: Any, F: Any, k: int, now: int) -> None:
    """Stands in."""


def on_evict(R: Any, M: Any, F: Any, k: int, now: int, to_tier: int) -> None:
    """Stands in."""


def victim(R: Any, M: Any, F: Any, now: int) -> int:
    """Stands in."""
    return -1


def on_miss(R: Any, M: Any, F: Any, k: int, now: int) -> None:
    """By default nothing is done before a miss."""


def admit(R: Any, M: Any, F: Any, k: int, now: int) -> bool:
    """By default everything is admitted."""
    return True


def on_remove(R: Any, M: Any, F: Any, k: int, now: int) -> None:
    """By default a removal is an eviction to nowhere, and no ghost stays."""
    if R[k].resident:
        on_evict(R, M, F, k, now, -1)
    if R[k].where > 0:
        b.unlink(R, M, k)


def on_next_use(R: Any, M: Any, F: Any, k: int, when: int, now: int) -> None:
    """By default a known next use changes nothing."""


def on_advance(R: Any, M: Any, F: Any, now: int) -> None:
    """By default time changes nothing."""


def emit(M: Any, E: Any, op: int, k: int, size: int, cost: float) -> None:
    """Appends an event for the next tier."""
    n = M[EVENTS]
    E[n].id = k
    E[n].op = op
    E[n].size = size
    E[n].cost = cost
    E[n].next_use = M[NOW]
    M[EVENTS] = n + 1


def leave(R: Any, M: Any, F: Any, E: Any, k: int, to_tier: int) -> None:
    """Entry k stops being resident."""
    size = R[k].size
    on_evict(R, M, F, k, M[NOW], to_tier)
    R[k].resident = 0
    R[k].tier = to_tier
    M[USED] -= size
    M[COUNT] -= 1
    M[EVICTIONS] += 1
    M[EVICTED_BYTES] += size
    if M[FLAGS] & EMIT:
        emit(M, E, PUT, k, size, R[k].cost)


def enter(R: Any, M: Any, F: Any, k: int) -> None:
    """Entry k, whose fields are set, becomes resident."""
    R[k].resident = 1
    R[k].tier = 0
    M[USED] += R[k].size
    M[COUNT] += 1
    if R[k].lease > 0:
        M[LEASED] += R[k].size
    on_insert(R, M, F, k, M[NOW])


def forget(R: Any, M: Any, F: Any, k: int) -> None:
    """Entry k, resident or ghost, is forgotten."""
    on_remove(R, M, F, k, M[NOW])
    if R[k].resident:
        M[USED] -= R[k].size
        M[COUNT] -= 1
        if R[k].lease > 0:
            M[LEASED] -= R[k].size
    R[k].resident = 0
    R[k].tier = -1
    R[k].lease = 0
    R[k].freq = 0
    R[k].seen = 0
    R[k].where = 0
    R[k].flag = 0
    R[k].pos = 0
    R[k].key = 0.0
    R[k].next_use = NEVER


def choose(R: Any, M: Any, F: Any) -> int:
    """The policy's victim, checked: -1 and an error word when it is none."""
    v = victim(R, M, F, M[NOW])
    M[ROUND] += 1
    if v < 0:
        M[ERROR] = NO_VICTIM
        return -1
    if v >= len(R) or (v != M[INCOMING] and (R[v].resident == 0 or R[v].lease > 0)):
        M[ERROR] = BAD_VICTIM
        M[ERROR_ID] = v
        return -1
    return int(v)


def select(R: Any, M: Any, F: Any, E: Any, need: int) -> int:
    """Writes victims of at least `need` bytes to E and returns their number; 0 when too few can be had."""
    M[ROUND] = 0
    if need <= 0 or M[USED] - M[LEASED] < need:
        return 0
    count = 0
    freed = 0
    while freed < need:
        v = choose(R, M, F)
        if v < 0 or (v == M[INCOMING] and R[v].resident == 0):
            freed = -1
            break
        E[count].id = v
        R[v].lease += 1  # as if leased, so that the next one differs
        M[LEASED] += R[v].size
        freed += R[v].size
        count += 1
    for i in range(count):
        R[E[i].id].lease -= 1
        M[LEASED] -= R[E[i].id].size
    return count if freed >= 0 else 0


def make_room(R: Any, M: Any, F: Any, E: Any, size: int) -> bool:
    """Evicts until `size` bytes fit. False, with nothing evicted, when they cannot or the policy bypasses."""
    need = M[USED] + size - M[CAPACITY]
    if need <= 0:
        return True
    if M[USED] - M[LEASED] < need:
        return False
    if M[FLAGS] & ATOMIC:
        start = M[EVENTS] if M[FLAGS] & EMIT else 0
        picked = E[start:]
        count = select(R, M, F, picked, need)
        for i in range(count):
            leave(R, M, F, E, int(picked[i].id), 1)
        return count > 0
    M[ROUND] = 0
    while M[USED] + size > M[CAPACITY]:
        v = choose(R, M, F)
        if v < 0 or (v == M[INCOMING] and R[v].resident == 0):
            return False
        leave(R, M, F, E, v, 1)
    return True


def admitted(R: Any, M: Any, F: Any, k: int, size: int) -> bool:
    """Whether admission lets the missed entry k in. Counts misses of k in `seen`."""
    kind = M[ADMISSION]
    if kind == SECOND_HIT:
        R[k].seen += 1
        return R[k].seen >= M[ADMISSION_LIMIT]
    if kind == SIZE_LIMIT:
        return size <= M[ADMISSION_LIMIT]
    if kind == GHOST:
        # `seen` is the clock of missed bytes, in units, at k's last miss: it was a ghost that recently.
        unit = M[ADMISSION_LIMIT] // 1024 + 1
        tick = M[b.ADMIT_CLOCK] // unit + 1
        before = R[k].seen
        R[k].seen = tick
        return before > 0 and tick - before <= 1024
    return True


def resize(R: Any, M: Any, k: int, size: int) -> None:
    """Entry k has another size now; the list that holds it and the books follow."""
    delta = size - R[k].size
    if R[k].where > 0:
        M[LISTS + 4 * R[k].where + 2] += delta
    if R[k].resident:
        M[USED] += delta
        if R[k].lease > 0:
            M[LEASED] += delta
    R[k].size = size


def hit(R: Any, M: Any, F: Any, E: Any, k: int, size: int) -> None:
    """A use of resident entry k. A grown entry pushes others out, or leaves when they cannot make room."""
    changed = size != R[k].size
    if changed:
        resize(R, M, k, size)
    on_hit(R, M, F, k, M[NOW])
    if changed and M[USED] > M[CAPACITY]:
        R[k].lease += 1
        if R[k].lease == 1:
            M[LEASED] += size
        fits = make_room(R, M, F, E, 0)
        R[k].lease -= 1
        if R[k].lease == 0:
            M[LEASED] -= size
            if not fits:
                leave(R, M, F, E, k, 1)


def fetch(R: Any, M: Any, F: Any, E: Any, k: int, size: int, cost: float) -> None:
    """Entry k, not resident, is wanted: room is made and it becomes resident unless something forbids it."""
    M[b.ADMIT_CLOCK] += size
    fits = size <= M[CAPACITY] - M[LEASED]
    if R[k].size != size:
        resize(R, M, k, size)
    R[k].cost = cost
    M[INCOMING] = k
    if fits and admitted(R, M, F, k, size) and admit(R, M, F, k, M[NOW]):
        on_miss(R, M, F, k, M[NOW])
        if make_room(R, M, F, E, size):
            M[INCOMING] = -1
            enter(R, M, F, k)
            return
    M[INCOMING] = -1
    M[REFUSED] += 1
    M[REFUSED_BYTES] += size
    if M[FLAGS] & EMIT:
        emit(M, E, PUT, k, size, cost)


def lookup(R: Any, M: Any, F: Any, E: Any, op: int, k: int, size: int, cost: float) -> int:
    """A counted request (GET, TAKE): 1 on a hit. A miss of GET is fetched."""
    if R[k].resident:
        M[HITS] += 1
        M[HIT_BYTES] += size
        F[COST_HIT] += cost
        if op == TAKE:
            forget(R, M, F, k)
        else:
            hit(R, M, F, E, k, size)
        return 1
    M[MISSES] += 1
    M[MISS_BYTES] += size
    F[COST_MISS] += cost
    if M[FLAGS] & EMIT:
        emit(M, E, TAKE, k, size, cost)
    if op == GET:
        fetch(R, M, F, E, k, size, cost)
    return 0


def apply(R: Any, M: Any, F: Any, E: Any, op: int, k: int, size: int, cost: float) -> int:
    """One operation on entry k. Its meaning of `size` and its result depend on `op`."""
    if op in (GET, TAKE):
        return lookup(R, M, F, E, op, k, size, cost)
    if op == HIT:
        if R[k].resident:
            on_hit(R, M, F, k, M[NOW])
            return 1
        M[ERROR] = NOT_RESIDENT
    elif op == VICTIMS:
        if k >= 0 and M[INCOMING] != k and R[k].resident == 0:
            M[INCOMING] = k
            on_miss(R, M, F, k, M[NOW])
        return select(R, M, F, E, size)
    elif op == INSERT:
        if R[k].resident == 0:
            if R[k].size != size:
                resize(R, M, k, size)
            R[k].cost = cost
            if M[INCOMING] != k:
                on_miss(R, M, F, k, M[NOW])
            M[INCOMING] = -1
            enter(R, M, F, k)
        else:
            resize(R, M, k, size)
            R[k].cost = cost
    elif op == EVICT:
        if R[k].resident and R[k].lease == 0:
            leave(R, M, F, E, k, size)
        else:
            M[ERROR] = NOT_RESIDENT
    elif op == PUT:
        if R[k].resident:
            hit(R, M, F, E, k, size)
        else:
            fetch(R, M, F, E, k, size, cost)
    elif op == REMOVE:
        forget(R, M, F, k)
    elif op == NEXT_USE:
        on_next_use(R, M, F, k, size, M[NOW])
        R[k].next_use = size
    elif op == LEASE:
        R[k].lease += 1
        if R[k].lease == 1 and R[k].resident:
            M[LEASED] += R[k].size
    elif op == RELEASE:
        if R[k].lease <= 0:
            M[ERROR] = BAD_RELEASE
            return 0
        R[k].lease -= 1
        if R[k].lease == 0 and R[k].resident:
            M[LEASED] -= R[k].size
    return 0


def step(R: Any, M: Any, F: Any, T: Any, E: Any, op: int, k: int, x: int, y: float) -> int:
    """One operation, or (op RUN) requests T[k:x]. Returns apply's result, or where a run stopped early."""
    if op != RUN:
        return apply(R, M, F, E, op, k, x, y)
    for i in range(k, x):
        q = T[i]
        who = int(q.id)  # 64 bits here as everywhere: another width would compile every part twice
        cost = q.cost
        if not cost >= 0.0:  # not recorded: from the tier's profile
            cost = F[COST_FIXED] + F[COST_PER_BYTE] * q.size
        if q.next_use >= 0:
            on_next_use(R, M, F, who, q.next_use, M[NOW])
            R[who].next_use = q.next_use
        T[i].hit = apply(R, M, F, E, int(q.op), who, q.size, cost)
        if M[ERROR] != 0:
            return i
        M[NOW] += 1
        on_advance(R, M, F, M[NOW])
    return x
