"""What a policy is made of: the entry record, the meta words and the hooks' contract.

A policy is a Python file of plain functions that numba compiles together with the engine's loop:

    on_insert(R, M, F, k, now)            entry k became resident (its size, cost and next use are set)
    on_hit(R, M, F, k, now)               entry k was used while resident
    on_evict(R, M, F, k, now, to_tier)    entry k stops being resident; a policy may keep it as a ghost
    victim(R, M, F, now) -> id or -1      the next entry to evict; skips leased ones; -1 when all are leased
    on_miss(R, M, F, k, now)              optional: k is wanted and not resident; called before `victim`
    admit(R, M, F, k, now) -> bool        optional: whether k, missed, may become resident
    on_remove(R, M, F, k, now)            optional: k is forgotten, ghosts too; by default on_evict to nowhere
    on_next_use(R, M, F, k, when, now)    optional: k's next use became known; the old one is still in R[k]
    on_advance(R, M, F, now)              optional: time went on by one, to `now`
    on_resize(R, M, F, k, delta)          optional: k grew by delta bytes (its list knows)
    on_chosen(R, M, F, now)               optional: the calls of `victim` for one purpose are over; what it put aside,
                                          to pass over leased pages once and not each time, comes back

R is the record array of `ENTRY`, indexed by dense id; M the int64 and F the float64 meta words. The engine
owns `size`, `cost`, `next_use`, `lease`, `tier`, `resident`, `seen` and the words below 32; the rest is the
policy's, zero when an id is new. Units: bytes, seconds (cost), requests (now, next_use).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba
import numpy as np

ENTRY = np.dtype(
    [
        ("size", "i8"),  # bytes
        ("next_use", "i8"),  # request index, NEVER when there is none
        ("cost", "f8"),  # seconds to load it again
        ("key", "f8"),  # spare word of the policy
        ("pos", "i8"),  # spare word of the policy
        ("prev", "i4"),  # links of the list that `where` names; ids
        ("next", "i4"),
        ("lease", "i4"),  # count of leases
        ("freq", "i4"),
        ("seen", "i4"),  # admission's memory
        ("tier", "i1"),  # where it went when it was evicted; -1 nowhere
        ("resident", "i1"),
        ("where", "i1"),  # number of the list that holds it, 0 none
        ("flag", "i1"),
    ],
    align=True,
)
"""One entry: 64 bytes, one cache line."""

REQUEST = np.dtype(
    [
        ("id", "i4"),
        ("op", "i1"),
        ("hit", "i1"),  # written by a run
        ("tag", "i2"),  # the reader's: layer or kind
        ("size", "i8"),
        ("next_use", "i8"),
        ("cost", "f8"),
    ],
    align=True,
)
"""One request of a trace, or one event of a run: 32 bytes."""

NEVER = 1 << 62

# Operations of a request.
GET, PUT, REMOVE, LEASE, RELEASE, TAKE, INSERT, HIT, VICTIMS, EVICT, NEXT_USE, ADVANCE, RUN, ADMITS = range(
    14
)

# The engine's words of M.
CAPACITY, USED, LEASED, COUNT, NOW, INCOMING, ROUND, ERROR, ERROR_ID = range(9)
ADMISSION, ADMISSION_LIMIT, FLAGS = 9, 10, 11
HITS, MISSES, HIT_BYTES, MISS_BYTES, EVICTIONS, EVICTED_BYTES, REFUSED, REFUSED_BYTES = range(12, 20)
EVENTS, ADMIT_CLOCK, INSERTS, INSERTED_BYTES, LOOKUP = range(20, 25)
MAY_REFUSE = 26  # 1 while the incoming entry may stay out: a policy's victim may then be that entry
LOOKUP_AT = 27  # index of the lookup's event
HOOK = 28  # number of the hook that runs, in a user's file
OVER = 25  # bytes that the policy wants to give up though there is room; a trace's run does, a store does not
LISTS = 32  # eight lists of four words: head, tail, bytes, count
WORDS = 64  # sixteen words of the policy
SCRATCH = 80  # as many more as the policy's `scratch` asked for

# The engine's words of F, and where the policy's begin.
COST_HIT, COST_MISS, COST_FIXED, COST_PER_BYTE = range(4)
FLOATS = 8
NUM_FLOATS = 32

# Bits of M[FLAGS].
EMIT = 1  # write events
ATOMIC = 2  # select every victim before the first is evicted, as the store does
NO_WARM = 4  # do not count (warm-up)

_Function = TypeVar("_Function", bound=Callable[..., Any])


def compiled(function: _Function) -> _Function:
    """A helper that hooks may call: compiled when a policy that uses it is."""
    return cast("_Function", numba.njit(function, nogil=True, error_model="numpy"))


@compiled
def push(R: Any, M: Any, number: int, k: int) -> None:
    """Puts entry k at the head of list `number`."""
    base = LISTS + 4 * number
    head = M[base] - 1
    R[k].where = number
    R[k].prev = -1
    R[k].next = head
    if head >= 0:
        R[head].prev = k
    else:
        M[base + 1] = k + 1
    M[base] = k + 1
    M[base + 2] += R[k].size
    M[base + 3] += 1


@compiled
def push_tail(R: Any, M: Any, number: int, k: int) -> None:
    """Puts entry k at the tail of list `number`."""
    base = LISTS + 4 * number
    tail = M[base + 1] - 1
    R[k].where = number
    R[k].next = -1
    R[k].prev = tail
    if tail >= 0:
        R[tail].next = k
    else:
        M[base] = k + 1
    M[base + 1] = k + 1
    M[base + 2] += R[k].size
    M[base + 3] += 1


@compiled
def unlink(R: Any, M: Any, k: int) -> None:
    """Takes entry k out of the list that holds it."""
    base = LISTS + 4 * R[k].where
    before = R[k].prev
    after = R[k].next
    if before >= 0:
        R[before].next = after
    else:
        M[base] = after + 1
    if after >= 0:
        R[after].prev = before
    else:
        M[base + 1] = before + 1
    R[k].where = 0
    M[base + 2] -= R[k].size
    M[base + 3] -= 1


@compiled
def head(M: Any, number: int) -> int:
    """Id at the head of list `number`, -1 when it is empty."""
    return int(M[LISTS + 4 * number] - 1)


@compiled
def tail(M: Any, number: int) -> int:
    """Id at the tail of list `number`, -1 when it is empty."""
    return int(M[LISTS + 4 * number + 1] - 1)


@compiled
def list_bytes(M: Any, number: int) -> int:
    """Bytes in list `number`."""
    return int(M[LISTS + 4 * number + 2])


@compiled
def list_count(M: Any, number: int) -> int:
    """Entries in list `number`."""
    return int(M[LISTS + 4 * number + 3])


@compiled
def last_free(R: Any, M: Any, number: int) -> int:
    """The entry nearest to the tail of list `number` that is not leased, -1 when there is none."""
    k = M[LISTS + 4 * number + 1] - 1
    while k >= 0 and R[k].lease > 0:
        k = R[k].prev
    return int(k)
