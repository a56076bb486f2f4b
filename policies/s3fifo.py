"""S3-FIFO, as published in 2023 and as its authors keep it now.

Paper: Yang et al., "FIFO queues are all you need for cache eviction", SOSP 2023; and the authors' library,
where until the first eviction a full small queue sends new pages to the main queue.
Idea: new pages pass through a small FIFO; those used `threshold` times there move to the main FIFO, the
others leave a ghost; a page whose ghost is wanted enters the main queue. The main queue gives second
chances.
Notes: the published code refuses pages larger than the small queue (10 % of the capacity), which silently
switches caching off for large pages: refuse_large=True does that; by default they enter the main queue.
Do not use it: for back-and-forth scans, as several passes over a tree make them: nothing is used twice
while it is in the small queue, and the cache works like a FIFO of a tenth of its size.
"""

from __future__ import annotations

from typing import Any

from tiercache.policies.base import CAPACITY, WORDS, last_free, list_bytes, list_count, push, tail, unlink
from tiercache.policies.errors import PolicyError

SMALL, MAIN, GHOST = 1, 2, 3
SMALL_BYTES, MAIN_BYTES, GHOST_BYTES, THRESHOLD, CURRENT, REFUSE, GHOST_HIT, EVICTED = range(WORDS, WORDS + 8)


def setup(
    M: Any,
    F: Any,
    *,
    small_share: float = 0.1,
    ghost_share: float = 0.9,
    threshold: int = 2,
    current: bool = True,
    refuse_large: bool = False,
) -> None:
    """Shares of the capacity; `threshold`: uses in the small queue that move a page on."""
    if not (0 < small_share < 1 and 0 <= ghost_share <= 16 and threshold >= 1):
        raise PolicyError(
            "policy s3fifo: small_share, ghost_share, threshold",
            got=(small_share, ghost_share, threshold),
            limit="0 to 1, 0 to 16, 1 and more",
        )
    M[SMALL_BYTES] = int(M[CAPACITY] * small_share)
    M[MAIN_BYTES] = M[CAPACITY] - M[SMALL_BYTES]
    M[GHOST_BYTES] = int(M[CAPACITY] * ghost_share)
    M[THRESHOLD] = threshold
    M[CURRENT] = current
    M[REFUSE] = refuse_large


def admit(R: Any, M: Any, F: Any, k: int, now: int) -> bool:
    """Everything, unless large pages are refused."""
    return M[REFUSE] == 0 or R[k].size < M[SMALL_BYTES]


def on_miss(R: Any, M: Any, F: Any, k: int, now: int) -> None:
    """A ghost's page goes to the main queue."""
    M[GHOST_HIT] = 0
    if R[k].where == GHOST:
        unlink(R, M, k)
        M[GHOST_HIT] = 1


def on_insert(R: Any, M: Any, F: Any, k: int, now: int) -> None:
    """Enters the small queue, or the main one."""
    early = M[CURRENT] and not M[EVICTED] and list_bytes(M, SMALL) >= M[SMALL_BYTES]
    to_main = M[GHOST_HIT] or early or R[k].size >= M[SMALL_BYTES]
    push(R, M, MAIN if to_main else SMALL, k)
    R[k].freq = 0
    M[GHOST_HIT] = 0


def on_hit(R: Any, M: Any, F: Any, k: int, now: int) -> None:
    """Counts."""
    R[k].freq += 1


def on_evict(R: Any, M: Any, F: Any, k: int, now: int, to_tier: int) -> None:
    """From the small queue a ghost stays."""
    was_new = R[k].where == SMALL
    unlink(R, M, k)
    if was_new and R[k].size <= M[GHOST_BYTES]:
        while list_bytes(M, GHOST) + R[k].size > M[GHOST_BYTES]:
            unlink(R, M, tail(M, GHOST))
        push(R, M, GHOST, k)


def on_remove(R: Any, M: Any, F: Any, k: int, now: int) -> None:
    """No ghost stays."""
    if R[k].where > 0:
        unlink(R, M, k)


def victim(R: Any, M: Any, F: Any, now: int) -> int:
    """From the main queue while it is over its bytes, else from the small one; used pages move on instead."""
    M[EVICTED] = 1
    stuck = 0  # both queues in turn gave nothing: all of one is leased
    while stuck < 3:
        number = MAIN if list_bytes(M, MAIN) > M[MAIN_BYTES] or list_count(M, SMALL) == 0 else SMALL
        if stuck > 0:
            number = SMALL if stuck == 1 else MAIN
        k = last_free(R, M, number)
        if k < 0:
            stuck += 1
        elif number == SMALL and R[k].freq >= M[THRESHOLD]:
            unlink(R, M, k)
            push(R, M, MAIN, k)
            R[k].freq = 0
        elif number == MAIN and R[k].freq >= 1:
            unlink(R, M, k)
            push(R, M, MAIN, k)
            R[k].freq = min(R[k].freq, 3) - 1
        else:
            return k
    return -1
