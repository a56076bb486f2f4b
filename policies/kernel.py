"""The engine's loop, in plain functions. `compiler.build` gives each policy a copy with its hooks put in.

What is imported from defaults.py is what gets replaced.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tiercache.policies import base as b
from tiercache.policies.books import admitted, emit, refuse
from tiercache.policies.defaults import (
    admit,
    on_advance,
    on_chosen,
    on_evict,
    on_hit,
    on_insert,
    on_miss,
    on_next_use,
    on_remove,
    on_resize,
    victim,
)
from tiercache.policies.prefetch import prefetch

ADVANCE_LIMIT = 1 << 20  # single steps of a jump in time
BAD_VICTIM, NO_VICTIM, NOT_RESIDENT, BAD_RELEASE = range(1, 5)
SELECT, TOGETHER, EACH = range(3)
FAR, NEAR = 16, 8  # requests ahead of the one that is done: a load from main memory takes about as long


def leave(R: Any, M: Any, F: Any, E: Any, k: int, to_tier: int) -> None:
    """Entry k stops being resident."""
    size = R[k].size
    on_evict(R, M, F, k, M[b.NOW], to_tier)
    R[k].resident = 0
    R[k].tier = to_tier
    M[b.USED] -= size
    M[b.COUNT] -= 1
    M[b.EVICTIONS] += 1
    M[b.EVICTED_BYTES] += size
    if M[b.FLAGS] & b.EMIT:
        emit(M, E, b.PUT, k, size, R[k].cost)


def enter(R: Any, M: Any, F: Any, k: int, now: int) -> None:
    """Entry k, whose fields are set, becomes resident."""
    size = R[k].size
    R[k].resident = 1
    R[k].tier = 0
    M[b.INCOMING] = -1
    M[b.USED] += size
    M[b.COUNT] += 1
    M[b.INSERTS] += 1
    M[b.INSERTED_BYTES] += size
    if R[k].lease > 0:
        M[b.LEASED] += size
    on_insert(R, M, F, k, now)


def forget(R: Any, M: Any, F: Any, k: int) -> None:
    """Entry k, resident or ghost, is forgotten."""
    on_remove(R, M, F, k, M[b.NOW])
    if R[k].resident:
        M[b.USED] -= R[k].size
        M[b.COUNT] -= 1
        if R[k].lease > 0:
            M[b.LEASED] -= R[k].size
    R[k].resident = 0
    R[k].tier = -1
    R[k].lease = 0
    R[k].freq = 0
    R[k].seen = 0
    R[k].where = 0
    R[k].flag = 0
    R[k].pos = 0
    R[k].key = 0.0
    R[k].next_use = b.NEVER


def free(R: Any, M: Any, F: Any, E: Any, need: int, mode: int) -> int:
    """Frees at least `need` bytes, or (SELECT) writes who would have to go to E. Their number, or -1.

    EACH evicts one before it asks for the next, TOGETHER and SELECT ask for all first. Nothing is evicted
    when leases leave too little; a policy that bypasses (victim returns the incoming one) does so in round 0.
    """
    if M[b.USED] - M[b.LEASED] < need:
        return -1
    start = M[b.EVENTS] if M[b.FLAGS] & b.EMIT else 0
    M[b.ROUND] = 0
    refused = False
    count = 0
    freed = 0
    while freed < need or (mode == EACH and M[b.OVER] > 0):
        count = 0
        while freed < need or (mode == EACH and count == 0):
            v = victim(R, M, F, M[b.NOW])
            M[b.ROUND] += 1
            if v < 0 and freed >= need:  # the policy only wished to give up more
                M[b.OVER] = 0
                break
            if v < 0 or v >= len(R) or R[v].resident == 0 or R[v].lease > 0:
                if v < 0 or v != M[b.INCOMING] or R[v].resident != 0:
                    M[b.ERROR] = NO_VICTIM if v < 0 else BAD_VICTIM
                    M[b.ERROR_ID] = v
                refused = True
                break
            R[v].lease = 1  # as if leased, so that the next one differs
            freed += R[v].size
            E[start + count].id = v
            count += 1
            if mode == EACH:
                break
        for i in range(start, start + count):
            R[E[i].id].lease = 0
        on_chosen(R, M, F, M[b.NOW])
        if refused:
            return -1
        if mode != SELECT:
            for i in range(start, start + count):
                one: Any = np.int64(E[i].id)
                leave(R, M, F, E, one, 1)
            start = M[b.EVENTS] if M[b.FLAGS] & b.EMIT else 0
    return count


def resize(R: Any, M: Any, F: Any, k: int, size: int) -> None:
    """Entry k has another size now; the list that holds it and the books follow."""
    delta = size - R[k].size
    on_resize(R, M, F, k, delta)
    if R[k].where > 0:
        M[b.LISTS + 4 * R[k].where + 2] += delta
    if R[k].resident:
        M[b.USED] += delta
        if R[k].lease > 0:
            M[b.LEASED] += delta
    R[k].size = size


def lookup(R: Any, M: Any, F: Any, E: Any, op: int, k: int, size: int, cost: float) -> int:
    """GET and TAKE are counted; 1 on a hit. GET and PUT make k resident unless something forbids it."""
    found = R[k].resident
    mode = TOGETHER if M[b.FLAGS] & b.ATOMIC else EACH
    if found:
        if op != b.PUT:
            M[b.HITS] += 1
            M[b.HIT_BYTES] += size
            F[b.COST_HIT] += cost
            if op == b.TAKE:
                forget(R, M, F, k)
                return 1
        if R[k].size != size:
            resize(R, M, F, k, size)
        on_hit(R, M, F, k, M[b.NOW])
        need = M[b.USED] - M[b.CAPACITY]
        if need <= 0 and (M[b.OVER] == 0 or mode != EACH):
            return 1
        R[k].lease += 1  # a grown entry pushes others out, or leaves when they cannot make room
        M[b.LEASED] += size if R[k].lease == 1 else 0
    else:
        if op != b.PUT:
            M[b.MISSES] += 1
            M[b.MISS_BYTES] += size
            F[b.COST_MISS] += cost
            if M[b.FLAGS] & b.EMIT:
                M[b.LOOKUP_AT] = M[b.EVENTS]
                emit(M, E, M[b.LOOKUP], k, size, cost)
            if op == b.TAKE:
                return 0
        if R[k].size != size:
            resize(R, M, F, k, size)
        R[k].cost = cost
        if size > M[b.CAPACITY] or (M[b.ADMISSION] != 0 and not admitted(R, M, k, size)):
            return refuse(R, M, E, op, k)
        if not admit(R, M, F, k, M[b.NOW]):
            return refuse(R, M, E, op, k)
        M[b.INCOMING] = k
        M[b.MAY_REFUSE] = 1
        on_miss(R, M, F, k, M[b.NOW])
        need = M[b.USED] + size - M[b.CAPACITY]
    count = 0
    if need > 0 or (M[b.OVER] > 0 and mode == EACH):
        count = free(R, M, F, E, need, mode)
    if found:
        R[k].lease -= 1
        M[b.LEASED] -= size if R[k].lease == 0 else 0
        if count < 0 and R[k].lease == 0:
            leave(R, M, F, E, k, 1)
    elif count < 0:
        return refuse(R, M, E, op, k)
    else:
        enter(R, M, F, k, M[b.NOW])
    return int(found)


def manage(R: Any, M: Any, F: Any, E: Any, op: int, k: int, size: int, cost: float) -> int:
    """What an owner does that keeps the books itself (the store). What `size` is depends on `op`."""
    if op == b.HIT and R[k].resident:
        on_hit(R, M, F, k, M[b.NOW])
    elif op == b.VICTIMS:
        M[b.MAY_REFUSE] = 0
        if k >= 0 and M[b.INCOMING] != k and R[k].resident == 0:
            M[b.INCOMING] = k
            on_miss(R, M, F, k, M[b.NOW])
        return max(free(R, M, F, E, size, SELECT), 0)
    elif op == b.ADMITS:
        if R[k].resident == 0 and R[k].size != size:
            resize(R, M, F, k, size)
        if M[b.ADMISSION] != 0 and not admitted(R, M, k, size):
            return 0
        return int(cost == 0.0 or admit(R, M, F, k, M[b.NOW]))
    elif op == b.INSERT:
        if R[k].size != size:
            resize(R, M, F, k, size)
        if R[k].resident == 0:
            R[k].cost = cost
            if M[b.INCOMING] != k:
                on_miss(R, M, F, k, M[b.NOW])
            enter(R, M, F, k, M[b.NOW])
    elif op == b.EVICT and R[k].resident and R[k].lease == 0:
        leave(R, M, F, E, k, size)
    elif op == b.REMOVE:
        forget(R, M, F, k)
        if M[b.FLAGS] & b.EMIT:
            emit(M, E, b.REMOVE, k, R[k].size, cost)
    elif op == b.ADVANCE:
        for time in range(max(M[b.NOW], size - ADVANCE_LIMIT), size):
            on_advance(R, M, F, time + 1)
        M[b.NOW] = size
    elif op == b.NEXT_USE:
        on_next_use(R, M, F, k, size, M[b.NOW])
        R[k].next_use = size
    elif op == b.LEASE or (op == b.RELEASE and R[k].lease > 0):
        before = R[k].lease
        R[k].lease = before + 1 if op == b.LEASE else before - 1
        if R[k].resident and (before == 0 or R[k].lease == 0):
            M[b.LEASED] += R[k].size if before == 0 else -R[k].size
    else:
        M[b.ERROR] = BAD_RELEASE if op == b.RELEASE else NOT_RESIDENT
    return 0


def step(R: Any, M: Any, F: Any, T: Any, E: Any, op: int, k: int, x: int, y: float) -> int:
    """One operation, or (RUN) requests T[k:x]: then the index of the first one that was not done.

    A run stops before x on an error and, when it emits, while E has room for one more request's events.
    """
    if op != b.RUN:
        return manage(R, M, F, E, op, k, x, y)
    for i in range(k, x):
        if i + FAR < x:  # records of coming requests, then the neighbours that their links name
            prefetch(R, np.int64(T[i + FAR].id))
            soon: Any = np.int64(T[i + NEAR].id)
            prefetch(R, np.int64(R[soon].prev))
            prefetch(R, np.int64(R[soon].next))
        q = T[i]
        who: Any = np.int64(q.id)  # 64 bits here as everywhere: another width would compile every part twice
        if M[b.FLAGS] & b.EMIT and len(E) - M[b.EVENTS] < M[b.COUNT] + 3:
            return i
        if q.next_use >= 0:
            on_next_use(R, M, F, who, q.next_use, M[b.NOW])
            R[who].next_use = q.next_use
        cost = q.cost
        if not cost >= 0.0:  # not recorded: from the tier's profile
            cost = F[b.COST_FIXED] + F[b.COST_PER_BYTE] * q.size
        op_of: Any = np.int64(q.op)
        if q.op in (b.GET, b.PUT, b.TAKE):
            T[i].hit = lookup(R, M, F, E, op_of, who, q.size, cost)
        else:
            T[i].hit = manage(R, M, F, E, op_of, who, q.size, cost)
        if M[b.ERROR] != 0:
            return i
        M[b.NOW] += 1
        on_advance(R, M, F, M[b.NOW])
    return x
