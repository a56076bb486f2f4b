"""The window: what is kept where it is, oldest first to go."""

from __future__ import annotations

from collections import OrderedDict, deque

from tiercache.runtime.offloading.storages import SavedStorage

# How many storages that somebody else held are looked at again whenever room is needed.
_LOOKS = 8


class Window:
    """Resident storages in the order in which they may go, and their bytes. The session's lock guards it.

    Storages that somebody else holds too (a batch, a buffer, a tensor still used by forward) are parked: their
    memory is not the graph's to free, so it isn't counted, and they are looked at again later.

    Attributes:
        used_bytes: of the storages that are counted.
        peak_bytes: most of them at any time.
    """

    def __init__(self) -> None:
        self.used_bytes = 0
        self.peak_bytes = 0
        self._counted: OrderedDict[int, SavedStorage] = OrderedDict()
        self._parked: deque[SavedStorage] = deque()

    def add(self, saved: SavedStorage) -> None:
        """A storage is here; it is the last to go."""
        saved.parked = False
        self._counted[saved.sequence] = saved
        self.used_bytes += saved.num_bytes
        self.peak_bytes = max(self.peak_bytes, self.used_bytes)

    def remove(self, saved: SavedStorage) -> None:
        """A storage goes."""
        if saved.parked:
            self._parked.remove(saved)
            saved.parked = False
        else:
            del self._counted[saved.sequence]
            self.used_bytes -= saved.num_bytes

    def look_again(self, *, all_of_them: bool = False) -> None:
        """Counts parked storages, as the oldest, that only the graph holds by now."""
        ours: list[SavedStorage] = []
        for _ in range(len(self._parked) if all_of_them else min(_LOOKS, len(self._parked))):
            saved = self._parked.popleft()
            (ours if saved.is_ours() else self._parked).append(saved)
        for saved in reversed(ours):
            self.add(saved)
            self._counted.move_to_end(saved.sequence, last=False)

    def next_to_move(self) -> SavedStorage | None:
        """The storage that was saved first among those that only the graph holds; None when there is none."""
        while self._counted:
            saved = next(iter(self._counted.values()))
            if saved.is_ours():
                return saved
            del self._counted[saved.sequence]
            self.used_bytes -= saved.num_bytes
            saved.parked = True
            self._parked.append(saved)
        return None
