"""Knapsacks at a turn: which pages to keep where room differs from visit to visit."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Item = tuple[float, float]  # size, value
Kept = list[tuple[int, float]]  # (index of the group, size) of each item kept

_EXACT_ITEMS = 24
_MOST_STATES = 4096


def fractional_value(sizes: Floats, values: Floats, room: float) -> float:
    """The most value that fits when one item may be cut: a bound of any choice of whole items.

    Args:
        sizes: of the items, the most valuable a byte first.
        values: of them.
        room: for them.
    """
    filled = np.cumsum(sizes)
    whole = int(np.searchsorted(filled, room, side="right"))
    value = float(values[:whole].sum())
    if whole < len(sizes):
        before = float(filled[whole - 1]) if whole else 0.0
        value += float(values[whole]) * (room - before) / float(sizes[whole])
    return value


def nested_value(
    groups: Sequence[Sequence[Item]], rooms: Sequence[float], *, first_room: float
) -> tuple[float, Kept]:
    """The most value of items kept, and which; an item of group k takes room before group k and all before it.

    Args:
        groups: items by distance from the turn, nearest first.
        rooms: for group k, the room that items of later groups may take together.
        first_room: the room that all items may take together.

    Exact up to a few dozen items; beyond that by value a byte, which loses less than one item's value where room is
    the same for all.
    """
    few = sum(map(len, groups)) <= _EXACT_ITEMS
    return (_by_states if few else _by_worth)(groups, rooms, first_room)


@dataclass(slots=True)
class _State:
    """Some items that are kept: their size and value, and how they came together."""

    size: float
    value: float
    before: _State | None = None
    last: tuple[int, float] = (0, 0.0)

    def kept(self) -> Kept:
        found, at = [], self
        while at.before is not None:
            found.append(at.last)
            at = at.before
        return found


def _by_states(
    groups: Sequence[Sequence[Item]], rooms: Sequence[float], first_room: float
) -> tuple[float, Kept]:
    """Far to near, the undominated choices so far."""
    limits = list(itertools.accumulate((first_room, *rooms), min))
    states = [_State(0.0, 0.0)]
    for k in range(len(groups) - 1, -1, -1):
        if states[-1].size > rooms[k]:
            states = [state for state in states if state.size <= rooms[k]]
        for size, value in groups[k]:
            if size <= limits[k]:
                more = [
                    _State(s.size + size, s.value + value, s, (k, size))
                    for s in states
                    if s.size + size <= first_room
                ]
                states = _undominated([*states, *more])
    best = max((state for state in states if state.size <= first_room), key=lambda state: state.value)
    return best.value, best.kept()


def _undominated(states: list[_State]) -> list[_State]:
    states.sort(key=lambda state: (state.size, -state.value))
    kept, best = [], -1.0
    for state in states:
        if state.value > best:
            kept.append(state)
            best = state.value
    # beyond that many they are thinned out, the most valuable kept
    step = -(-len(kept) // _MOST_STATES)
    return kept if step == 1 else [*kept[:-1:step], kept[-1]]


def _by_worth(
    groups: Sequence[Sequence[Item]], rooms: Sequence[float], first_room: float
) -> tuple[float, Kept]:
    """The most valuable a byte first, as long as they fit."""
    left = np.array([first_room, *rooms])
    items = [(k, size, value) for k, group in enumerate(groups) for size, value in group]
    total, kept = 0.0, []
    for k, size, value in sorted(items, key=lambda item: -item[2] / max(item[1], 1e-12)):
        mine = left[: k + 1]
        if mine.min() >= size:
            mine -= size
            total += value
            kept.append((k, size))
    return total, kept
