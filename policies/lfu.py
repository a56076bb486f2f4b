"""Least frequently used, among pages in the cache.

Paper: folklore; Aho, Denning and Ullman, "Principles of optimal page replacement", JACM 1971.
Idea: a page's count of uses since it entered; the least goes first, the least recently used one among
equals.
Do not use it: when what is hot changes; old counts never fade.
"""

from __future__ import annotations

from typing import Any

from tiercache.policies.structures.heap import drop, heap_words, join, least_free, restore, touch


def scratch(max_entries: int) -> int:
    """The heap."""
    return heap_words(max_entries)


def on_insert(R: Any, M: Any, F: Any, k: int, now: int) -> None:
    """Counts the first use."""
    join(R, M, k, 1.0)


def on_hit(R: Any, M: Any, F: Any, k: int, now: int) -> None:
    """Counts."""
    touch(R, M, k, R[k].key + 1.0)


def on_evict(R: Any, M: Any, F: Any, k: int, now: int, to_tier: int) -> None:
    """Its count is lost."""
    drop(R, k)


def victim(R: Any, M: Any, F: Any, now: int) -> int:
    """The least count."""
    return least_free(R, M)


def on_chosen(R: Any, M: Any, F: Any, now: int) -> None:
    """Leased pages come back into the heap."""
    restore(R, M)
