"""Sparse selection: each query attends to the keys that an indexer ranks highest over its whole prefix.

The indexer's keys are pages of their own, small and without gradients. They come one page at a time; of each the best
are kept beside the best so far, which ends with the best of all. What the queries of a captured node selected is a page
too: its pop attends to the same keys and ranks nothing again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch.nn import functional

from tiercache.entry import PageKey
from tiercache.runtime.frame import Frame, PageCall
from tiercache.runtime.kernels import MASKED

INDEX_KEY, SELECTION = "index_key", "selection"
_QUERIES = 64  # ranked at a time: an indexer holds scores of all its heads for them

Best = tuple[torch.Tensor, torch.Tensor]
"""Scores [n, k] of the highest keys, and where they are, among those that were ranked."""
Rank = Callable[[slice, Callable[[torch.Tensor], torch.Tensor], torch.Tensor], Best]
"""(queries, what makes of their own keys [1, n, D] those to rank [1, N, D], which of them each sees) -> the best."""


@dataclass(frozen=True, slots=True)
class Selection:
    """What the queries of a visit attend to in one layer, or in several that share it.

    Attributes:
        frame: the visit.
        index: of the indexer in the model.
        positions: [T, K] int32 along the path, -1 where fewer than K keys are seen; None where they lie in the store.
    """

    frame: Frame
    index: int
    positions: torch.Tensor | None = None

    @contextmanager
    def opened(self) -> Iterator[torch.Tensor]:
        """The positions, for as long as they are used."""
        if self.positions is not None:
            yield self.positions
        else:
            with self.frame.store.read(_own_key(self.frame, self.index, SELECTION)) as lease:
                yield lease.tensor


@contextmanager
def selected(selection: Selection | None) -> Iterator[torch.Tensor | None]:
    """The positions of a selection, or None without one."""
    if selection is None:
        yield None
        return
    with selection.opened() as positions:
        yield positions


def select(frame: Frame, index: int, rank: Rank, top_k: int) -> Selection:
    """Ranks the keys that each query of a visit sees; a pop takes what its capture found.

    Args:
        frame: the visit.
        index: of the indexer.
        rank: by the indexer's own scores.
        top_k: keys that a query attends to at most.
    """
    if frame.phase == "pop":
        return Selection(frame, index)
    best = _best_of_own(frame, index, rank, top_k)
    for ancestor in frame.ancestors:
        with frame.store.read(PageKey(ancestor.digest, index, INDEX_KEY)) as lease:
            _improve(best, rank, lease.tensor, ancestor.position)
    scores, positions = best
    positions = positions.masked_fill(scores == -torch.inf, -1).to(torch.int32)
    if not frame.records_selection:
        return Selection(frame, index, positions)
    frame.store.put(_own_key(frame, index, SELECTION), positions)
    return Selection(frame, index)


def _own_key(frame: Frame, index: int, kind: str) -> PageKey:
    return PageKey(frame.pieces[0].digest, index, kind)


def _parts(begin: int, end: int) -> Iterator[slice]:
    return (slice(at, min(at + _QUERIES, end)) for at in range(begin, end, _QUERIES))


def _best_of_own(frame: Frame, index: int, rank: Rank, top_k: int) -> Best:
    """[T, K] of each node's own keys; at capture they become a page."""
    parts: list[Best] = []
    for piece in frame.pieces:
        keys: list[torch.Tensor] = []

        def give(own: torch.Tensor, keys: list[torch.Tensor] = keys) -> torch.Tensor:
            keys.append(own)
            return torch.cat(keys, 1)

        for queries in _parts(piece.begin, piece.end):
            first, last = queries.start - piece.begin, queries.stop - piece.begin
            seen = torch.ones(last - first, last, dtype=torch.bool, device=frame.device).tril(first)
            scores, found = rank(queries, give, seen[None])
            missing = (0, top_k - scores.shape[-1])
            parts.append(
                (
                    functional.pad(scores, missing, value=-torch.inf),
                    functional.pad(found + piece.position, missing),
                )
            )
        if frame.phase == "capture":
            frame.store.put(_own_key(frame, index, INDEX_KEY), torch.cat(keys, 1))
    return torch.cat([scores for scores, _ in parts]), torch.cat([found for _, found in parts])


def _improve(best: Best, rank: Rank, page: torch.Tensor, position: int) -> None:
    """Lets the keys of a page [1, N, D], which begins at `position`, compete, in place."""
    scores, positions = best
    all_seen = torch.ones(1, 1, 1, dtype=torch.bool, device=page.device)
    for queries in _parts(0, len(scores)):
        theirs, found = rank(queries, lambda _own: page, all_seen)
        together = torch.cat([scores[queries], theirs], -1)
        places = torch.cat([positions[queries], found + position], -1)
        top = together.topk(scores.shape[-1], dim=-1)
        scores[queries], positions[queries] = top.values, places.gather(-1, top.indices)


def selected_bias(positions: torch.Tensor, first: int, count: int, seen: torch.Tensor | None) -> torch.Tensor:
    """[n, count] mask of queries with these positions [n, K] against keys `first`..: 0 where selected, else MASKED.

    Args:
        positions: of the queries.
        first: position of the first key.
        count: of keys.
        seen: a mask of the same form that holds too, or None.
    """
    at = positions.long() - first
    at = torch.where((at >= 0) & (at < count), at, count)
    bias = torch.full((len(at), count + 1), MASKED, device=at.device).scatter_(1, at, 0.0)[:, :count]
    return bias if seen is None else torch.minimum(bias, seen)


def selected_call(call: PageCall, positions: torch.Tensor | None) -> PageCall:
    """A product with a page in which each query sees the keys that it selected."""
    if positions is None:
        return call
    mine = positions[call.q_begin : call.q_end]
    first = call.ancestor.position + call.k_begin
    return replace(call, bias=selected_bias(mine, first, call.k_end - call.k_begin, call.bias))
