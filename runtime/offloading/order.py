"""Which stored storage backward will ask for next."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from itertools import pairwise

# How many storages that are not in the store the search for one that is may pass.
_HOPS = 16


class UnpackOrder:
    """The stored storages, and a guess of which is asked for next: the reverse of packing, corrected by what is seen.

    Args:
        learned: sequence numbers in the order in which an earlier graph of the same step asked for them.

    Attributes:
        observed: sequence numbers in the order in which they were first asked for. What is asked for again is still
            there: an operator's output that the next one saved too is asked for by both.
    """

    def __init__(self, learned: list[int] | None = None) -> None:
        self.observed: list[int] = []
        self._seen: set[int] = set()
        self._after = dict(pairwise(learned or ()))
        self._step = -1
        self._stored: list[int] = []

    def __len__(self) -> int:
        return len(self._stored)

    def add(self, sequence: int) -> None:
        """A storage went to the store."""
        insort(self._stored, sequence)

    def remove(self, sequence: int) -> None:
        """A storage came back, or is not needed any more."""
        self._stored.pop(bisect_left(self._stored, sequence))

    def note(self, sequence: int) -> None:
        """A storage was asked for."""
        if sequence in self._seen:
            return
        if self.observed:
            last = self.observed[-1]
            if self._after.get(last) != sequence:
                # What an earlier graph did does not hold here.
                self._after.pop(last, None)
                self._step = 1 if sequence > last else -1
        self.observed.append(sequence)
        self._seen.add(sequence)

    def upcoming(self, sequence: int, count: int) -> list[int]:
        """Up to `count` stored storages that will be asked for after this one, soonest first."""
        found: list[int] = []
        at = sequence
        for _ in range(_HOPS):
            following = self._after.get(at)
            if following is None:
                following = self._neighbour(at)
            if following in (None, sequence) or following in found or len(found) == count:
                break
            at = following
            place = bisect_left(self._stored, at)
            if place < len(self._stored) and self._stored[place] == at:
                found.append(at)
        return found

    def _neighbour(self, sequence: int) -> int | None:
        if self._step < 0:
            place = bisect_left(self._stored, sequence) - 1
            return self._stored[place] if place >= 0 else None
        place = bisect_right(self._stored, sequence)
        return self._stored[place] if place < len(self._stored) else None
