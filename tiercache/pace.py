"""How fast the run and its copies are: when a copy has to start, and what a reload costs."""

from __future__ import annotations

from collections import deque

_WINDOW = 32  # accesses timed together, and the windows remembered: the fastest of them counts
_NUM_WINDOWS = 8
_NEAR = 16  # accesses ahead that are always due
_SAFETY = 2.0
_WEIGHT = 0.2  # of a new copy in the measured bandwidth
# Until copies were seen: bytes a second from and to the tier below the device, and the tier below that.
_ASSUMED = (6e9, 1.5e9)


class Pace:
    """Measured seconds an access and bytes a second of each copy, under the store's lock."""

    def __init__(self) -> None:
        self._speeds: dict[tuple[int, int], float] = {}
        self._windows: deque[float] = deque(maxlen=_NUM_WINDOWS)
        self._count = 0
        self._since_s = 0.0

    def note_access(self, now_s: float) -> None:
        """The run made an access."""
        if self._count % _WINDOW == 0:
            if self._count:
                self._windows.append((now_s - self._since_s) / _WINDOW)
            self._since_s = now_s
        self._count += 1

    def note_copy(self, origin: int, target: int, num_bytes: int, seconds: float) -> None:
        """A copy between two levels ended."""
        if num_bytes <= 0 or seconds <= 0:
            return
        speed = num_bytes / seconds
        known = self._speeds.get((origin, target), speed)
        self._speeds[origin, target] = (1 - _WEIGHT) * known + _WEIGHT * speed

    def bytes_per_s(self, origin: int, target: int) -> float:
        """Of a copy between two levels, one of which is the device."""
        assumed = _ASSUMED[min(max(origin, target), len(_ASSUMED)) - 1]
        return self._speeds.get((origin, target), assumed)

    def reload_s(self, level: int, num_bytes: int) -> float:
        """Seconds to send a page one level down and to bring it back."""
        down, up = self.bytes_per_s(level, level + 1), self.bytes_per_s(level + 1, level)
        return num_bytes / down + num_bytes / up

    def is_due(self, distance: int, level: int, window_bytes: int) -> bool:
        """Whether a page at `level`, used `distance` accesses from now, should be brought up by now.

        The latest safe start: the time to fill the whole look-ahead window of `window_bytes`, twice, before the use as
        the fastest recent stretch of the run would come to it. A burst of uses as large as the window is in time.
        """
        if distance <= _NEAR or len(self._windows) < 2:
            return True
        left_s = distance * min(self._windows)
        return left_s <= _SAFETY * window_bytes / self.bytes_per_s(level, 0)
