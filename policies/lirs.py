"""LIRS: low inter-reference recency set, in bytes.

Paper: Jiang and Zhang, "LIRS: an efficient low inter-reference recency set replacement policy", SIGMETRICS
2002.
Idea: pages with two close uses (LIR) own almost all bytes; the others (HIR) share `hir_share` of them in a
queue Q. A stack S, in order of last use and with ghosts, says which HIR page came back soon enough to
change places with the bottom LIR page.
Notes: both shares are limits of their own, so a page may leave (`OVER`) though the cache has room; a store
evicts only for room and takes Q's tail then. S is cut to twice the capacity by its oldest ghosts. A page
larger than Q is refused in a trace (as in the reference): with large pages raise hir_share.
Do not use it: when the set of hot pages changes faster than S turns over.
"""

from __future__ import annotations

from typing import Any

from tiercache.policies.base import (
    CAPACITY,
    OVER,
    WORDS,
    compiled,
    last_free,
    list_bytes,
    push,
    push_tail,
    tail,
    unlink,
)
from tiercache.policies.errors import PolicyError

Q, GHOSTS = 1, 2  # resident HIR pages; ghosts of S in order of eviction
S_HEAD, S_TAIL, S_BYTES, LIR_BYTES, LIR_LIMIT, HIR_LIMIT, AS_LIR = range(WORDS, WORDS + 7)
LIR, IN_S = 1, 2  # bits of flag; S is linked by pos (towards the top) and freq (towards the bottom)

admit_is_fit = True  # a page that no queue could hold; a store does not ask


def setup(M: Any, F: Any, *, hir_share: float = 0.01) -> None:
    """`hir_share`: share of the capacity for HIR pages."""
    if not 0 < hir_share < 1:
        raise PolicyError("policy lirs: hir_share", got=hir_share, limit="0 to 1")
    M[HIR_LIMIT] = max(1, int(hir_share * M[CAPACITY]))
    M[LIR_LIMIT] = M[CAPACITY] - M[HIR_LIMIT]


@compiled
def s_push(R: Any, M: Any, k: int) -> None:
    """Puts k on top of S."""
    top = M[S_HEAD] - 1
    R[k].pos = -1
    R[k].freq = top
    if top >= 0:
        R[top].pos = k
    else:
        M[S_TAIL] = k + 1
    M[S_HEAD] = k + 1
    R[k].flag |= IN_S
    M[S_BYTES] += R[k].size


@compiled
def s_unlink(R: Any, M: Any, k: int) -> None:
    """Takes k out of S."""
    above = R[k].pos
    below = R[k].freq
    if above >= 0:
        R[above].freq = below
    else:
        M[S_HEAD] = below + 1
    if below >= 0:
        R[below].pos = above
    else:
        M[S_TAIL] = above + 1
    R[k].flag &= ~IN_S
    M[S_BYTES] -= R[k].size


@compiled
def prune(R: Any, M: Any) -> None:
    """Takes HIR pages off S's bottom; a ghost is then forgotten."""
    k = M[S_TAIL] - 1
    while k >= 0 and k != M[S_HEAD] - 1 and not R[k].flag & LIR:
        above = R[k].pos
        s_unlink(R, M, k)
        if R[k].where == GHOSTS:
            unlink(R, M, k)
        k = above


@compiled
def make_lir_room(R: Any, M: Any, size: int) -> None:
    """Demotes LIR pages from S's bottom to Q until `size` more LIR bytes fit."""
    while M[LIR_BYTES] + size > M[LIR_LIMIT] and M[LIR_BYTES] > 0:
        k = M[S_TAIL] - 1
        if not R[k].flag & LIR:
            prune(R, M)
            k = M[S_TAIL] - 1
            if not R[k].flag & LIR:
                return
        s_unlink(R, M, k)
        R[k].flag &= ~LIR
        M[LIR_BYTES] -= R[k].size
        if R[k].size <= M[HIR_LIMIT]:
            push(R, M, Q, k)
        else:
            push_tail(R, M, Q, k)
        prune(R, M)


@compiled
def bound(R: Any, M: Any, incoming: int) -> None:
    """Cuts S, and says how many bytes Q is over its limit."""
    while M[S_BYTES] > 2 * M[CAPACITY] and tail(M, GHOSTS) >= 0:
        k = tail(M, GHOSTS)
        unlink(R, M, k)
        s_unlink(R, M, k)
    M[OVER] = max(0, list_bytes(M, Q) + incoming - M[HIR_LIMIT])


def admit(R: Any, M: Any, F: Any, k: int, now: int) -> bool:
    """A ghost of S, or what fits Q and the LIR share."""
    return R[k].where == GHOSTS or (R[k].size <= M[HIR_LIMIT] and R[k].size <= M[LIR_LIMIT])


def on_miss(R: Any, M: Any, F: Any, k: int, now: int) -> None:
    """Decides k's class and makes room for it there."""
    size = R[k].size
    if R[k].where == GHOSTS:
        unlink(R, M, k)
        s_unlink(R, M, k)
        s_push(R, M, k)
        make_lir_room(R, M, size)
        M[AS_LIR] = 1
    else:
        M[AS_LIR] = M[LIR_BYTES] + size <= M[LIR_LIMIT]
    bound(R, M, 0 if M[AS_LIR] else size)


def on_insert(R: Any, M: Any, F: Any, k: int, now: int) -> None:
    """Enters S, and Q unless it is LIR."""
    if not R[k].flag & IN_S:
        s_push(R, M, k)
    if M[AS_LIR]:
        R[k].flag |= LIR
        M[LIR_BYTES] += R[k].size
    else:
        push(R, M, Q, k)
    bound(R, M, 0)


def on_hit(R: Any, M: Any, F: Any, k: int, now: int) -> None:
    """Moves to the top; an HIR page found in S becomes LIR."""
    size = R[k].size
    if R[k].flag & LIR:
        s_unlink(R, M, k)
        s_push(R, M, k)
        prune(R, M)
    elif R[k].flag & IN_S:
        s_unlink(R, M, k)
        s_push(R, M, k)
        unlink(R, M, k)
        make_lir_room(R, M, size)
        R[k].flag |= LIR
        M[LIR_BYTES] += size
    else:
        unlink(R, M, k)
        push(R, M, Q, k)
        make_lir_room(R, M, size)
        s_push(R, M, k)
    bound(R, M, 0)


def on_evict(R: Any, M: Any, F: Any, k: int, now: int, to_tier: int) -> None:
    """An HIR page that is in S becomes a ghost."""
    before = M[OVER] - list_bytes(M, Q) + M[HIR_LIMIT]  # bytes that are about to enter Q
    if R[k].where == Q:
        unlink(R, M, k)
        if R[k].flag & IN_S:
            push(R, M, GHOSTS, k)
    else:
        s_unlink(R, M, k)
        R[k].flag = 0
        M[LIR_BYTES] -= R[k].size
        prune(R, M)
    bound(R, M, before if M[OVER] > 0 else 0)


def on_remove(R: Any, M: Any, F: Any, k: int, now: int) -> None:
    """Leaves every list."""
    if R[k].where > 0:
        unlink(R, M, k)
    if R[k].flag & LIR:
        M[LIR_BYTES] -= R[k].size
    if R[k].flag & IN_S:
        s_unlink(R, M, k)
        prune(R, M)
    bound(R, M, 0)


def on_resize(R: Any, M: Any, F: Any, k: int, delta: int) -> None:
    """S's and the LIR pages' bytes follow."""
    if R[k].flag & IN_S:
        M[S_BYTES] += delta
    if R[k].flag & LIR:
        M[LIR_BYTES] += delta


def victim(R: Any, M: Any, F: Any, now: int) -> int:
    """Q's tail; when all of Q is leased, the LIR page nearest to S's bottom."""
    k = last_free(R, M, Q)
    if k >= 0:
        return k
    k = M[S_TAIL] - 1
    while k >= 0 and not (R[k].flag & LIR and R[k].lease == 0):
        k = R[k].pos
    return k
