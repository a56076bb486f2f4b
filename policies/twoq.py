"""2Q, the full version.

Paper: Johnson and Shasha, "2Q: a low overhead high performance buffer management replacement algorithm",
VLDB 1994.
Idea: new pages pass through a FIFO (A1in); what is wanted again after it left, while its ghost is in A1out,
was worth keeping and enters an LRU list (Am). A hit in A1in does not promote: such uses are often one use,
split.
Do not use it: when reuses come sooner than A1in is long; nothing then reaches Am.
"""

from __future__ import annotations

from typing import Any

from tiercache.policies.base import CAPACITY, WORDS, last_free, list_bytes, push, tail, unlink
from tiercache.policies.errors import PolicyError

A1IN, AM, A1OUT = 1, 2, 3
IN_BYTES, OUT_BYTES, GHOST_HIT = WORDS, WORDS + 1, WORDS + 2


def setup(M: Any, F: Any, *, in_share: float = 0.25, out_share: float = 0.5) -> None:
    """`in_share`: bytes of A1in, `out_share`: bytes that the ghosts in A1out stand for; shares of the capacity."""
    if not (0 < in_share < 1 and 0 <= out_share <= 16):
        raise PolicyError("policy 2q: in_share, out_share", got=(in_share, out_share), limit="1, 16")
    M[IN_BYTES] = int(M[CAPACITY] * in_share)
    M[OUT_BYTES] = int(M[CAPACITY] * out_share)


def on_miss(R: Any, M: Any, F: Any, k: int, now: int) -> None:
    """A ghost's page goes to Am."""
    M[GHOST_HIT] = 0
    if R[k].where == A1OUT:
        unlink(R, M, k)
        M[GHOST_HIT] = 1


def on_insert(R: Any, M: Any, F: Any, k: int, now: int) -> None:
    """Enters A1in, or Am after a ghost hit."""
    push(R, M, AM if M[GHOST_HIT] else A1IN, k)
    M[GHOST_HIT] = 0


def on_hit(R: Any, M: Any, F: Any, k: int, now: int) -> None:
    """Moves to the head of Am; in A1in it changes nothing."""
    if R[k].where == AM:
        unlink(R, M, k)
        push(R, M, AM, k)


def on_evict(R: Any, M: Any, F: Any, k: int, now: int, to_tier: int) -> None:
    """From A1in a ghost stays."""
    was_new = R[k].where == A1IN
    unlink(R, M, k)
    if was_new:
        push(R, M, A1OUT, k)
        while list_bytes(M, A1OUT) > M[OUT_BYTES]:
            unlink(R, M, tail(M, A1OUT))


def on_remove(R: Any, M: Any, F: Any, k: int, now: int) -> None:
    """No ghost stays."""
    if R[k].where > 0:
        unlink(R, M, k)


def victim(R: Any, M: Any, F: Any, now: int) -> int:
    """A1in's tail while it is over its bytes, else Am's."""
    first = A1IN if list_bytes(M, A1IN) > M[IN_BYTES] else AM
    k = last_free(R, M, first)
    return k if k >= 0 else last_free(R, M, A1IN + AM - first)
