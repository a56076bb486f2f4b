"""A fake accelerator: copies happen late, in any order that its streams allow, and freed memory is poisoned."""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from tiercache.clock import Clock
from tiercache.errors import StoreTimeoutError
from tiercache.streams import CopyEngine

_POISON = 0xDB
_COMPUTE, _UP, _DOWN = "compute", "up", "down"


class _Event:
    __slots__ = ("done",)

    def __init__(self) -> None:
        self.done = False


class LateDevice(CopyEngine):
    """Device memory is CPU memory here, but nothing is done when it is asked for.

    Work is queued on three streams and carried out in a random order that keeps each stream's own order and its
    waits for events, only while somebody waits or calls `run`. Memory behaves as under a caching allocator: it
    may be reused, and is overwritten with a pattern, as soon as the stream that allocated it gets there, and
    the streams that `use` named have passed the moment of release.

    Args:
        seed: of the order.
    """

    late = True

    def __init__(self, seed: int = 0) -> None:
        self._random = random.Random(seed)  # noqa: S311 - an order, not a secret
        self._lock = threading.RLock()
        self._queues: dict[str, deque[Callable[[], bool]]] = {_COMPUTE: deque(), _UP: deque(), _DOWN: deque()}
        self._owners: dict[int, str] = {}
        self._users: dict[int, set[str]] = {}
        self.num_freed = 0

    # What a test does

    def launch(self, kernel: Callable[[], Any]) -> None:
        """Queues a kernel on the compute stream."""
        self._push(_COMPUTE, kernel)

    def run(self, num_steps: int | None = None) -> None:
        """Carries out that many steps, or all there are."""
        while num_steps != 0 and self._step():
            if num_steps is not None:
                num_steps -= 1

    # What the store does

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Poisoned memory of the upward stream."""
        return self._allocate(shape, dtype, _UP)

    def clone(self, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Memory of the compute stream, filled late."""
        out = self._allocate(tuple(tensor.shape), dtype, _COMPUTE)
        self._push(_COMPUTE, lambda: out.copy_(tensor))
        return out

    def add(self, total: torch.Tensor, tensor: torch.Tensor) -> None:
        """Adds late, on the compute stream."""
        self._push(_COMPUTE, lambda: total.add_(tensor))

    def mark(self, tensor: torch.Tensor) -> _Event:
        """An event on the compute stream."""
        return self._record(_COMPUTE)

    def to_host(self, source: torch.Tensor, out: torch.Tensor, after: Any) -> _Event:
        """Copies late, on the downward stream."""
        with self._lock:
            self._await(_DOWN, after)
            self._push(_DOWN, lambda: out.copy_(source))
            return self._record(_DOWN)

    def to_device(self, source: torch.Tensor, out: torch.Tensor) -> _Event:
        """Copies late, on the upward stream."""
        with self._lock:
            self._push(_UP, lambda: out.copy_(source))
            return self._record(_UP)

    def wait(self, event: Any, tensor: torch.Tensor) -> None:
        """The compute stream waits."""
        self._await(_COMPUTE, event)

    def use(self, tensor: torch.Tensor) -> None:
        """The compute stream uses the memory."""
        with self._lock:
            self._users.setdefault(tensor.data_ptr(), set()).add(_COMPUTE)

    def finish(self, event: Any, deadline: float, clock: Clock) -> None:
        """Carries out steps until the event happened."""
        while event is not None and not event.done:
            if not self._step() and not event.done:
                raise StoreTimeoutError("fake device: the event can never happen")

    def free(self, tensor: torch.Tensor) -> None:
        """Poisons the memory as soon as an allocator could hand it out again."""
        with self._lock:
            owner = self._owners.pop(tensor.data_ptr(), _COMPUTE)
            for user in self._users.pop(tensor.data_ptr(), set()):
                if user != owner:
                    self._await(owner, self._record(user))
            self._push(owner, lambda: poison(tensor))
            self.num_freed += 1

    # Streams

    def _allocate(self, shape: tuple[int, ...], dtype: torch.dtype, owner: str) -> torch.Tensor:
        out = poison(torch.empty(shape, dtype=dtype))
        with self._lock:
            self._owners[out.data_ptr()] = owner
            self._users.pop(out.data_ptr(), None)
        return out

    def _push(self, stream: str, work: Callable[[], Any]) -> None:
        def step() -> bool:
            work()
            return True

        with self._lock:
            self._queues[stream].append(step)

    def _record(self, stream: str) -> _Event:
        event = _Event()
        self._push(stream, lambda: setattr(event, "done", True))
        return event

    def _await(self, stream: str, event: Any) -> None:
        if event is not None:
            with self._lock:
                self._queues[stream].append(lambda: bool(event.done))

    def _step(self) -> bool:
        """Carries out the head of one stream, chosen at random among those that can go on."""
        with self._lock:
            streams = [name for name, queue in self._queues.items() if queue]
            self._random.shuffle(streams)
            for name in streams:
                if self._queues[name][0]():
                    self._queues[name].popleft()
                    return True
            return False


def poison(tensor: torch.Tensor) -> torch.Tensor:
    """Overwrites a tensor's bytes with a pattern."""
    if tensor.numel():
        tensor.reshape(-1).view(torch.uint8).fill_(_POISON)
    return tensor
