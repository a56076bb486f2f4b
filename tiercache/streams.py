"""How a device's memory is allocated, copied and given back: at once on the CPU, on own streams elsewhere."""

from __future__ import annotations

from typing import Any

import torch

from tiercache.clock import Clock
from tiercache.errors import ConfigError, StoreTimeoutError

_SPINS = 20
_SLEEPS_S = (20e-6, 1e-3)


class CopyEngine:
    """Copies between a device and host memory; this one is the CPU's, where all happens at once.

    Events are opaque; None stands for "done already". Every method returns without waiting but `finish`.
    """

    late = False

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Memory on the device that `to_device` will fill."""
        return torch.empty(shape, dtype=dtype, device=device)

    def clone(self, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """A contiguous copy on the device, on the caller's stream."""
        out = torch.empty(tensor.shape, dtype=dtype, device=tensor.device)
        return out.copy_(tensor)

    def add(self, total: torch.Tensor, tensor: torch.Tensor) -> None:
        """Adds in place, on the caller's stream."""
        total.add_(tensor)

    def mark(self, tensor: torch.Tensor) -> Any:
        """An event after all that the caller's stream has been given so far."""
        return None

    def to_host(self, source: torch.Tensor, out: torch.Tensor, after: Any) -> Any:
        """Copies to host memory once `after` happened; returns the event of its end."""
        out.copy_(source)

    def to_device(self, source: torch.Tensor, out: torch.Tensor) -> Any:
        """Copies from host memory into what `empty` returned; returns the event of its end."""
        out.copy_(source)

    def wait(self, event: Any, tensor: torch.Tensor) -> None:
        """Makes the caller's stream, not the caller, wait for the event."""

    def use(self, tensor: torch.Tensor) -> None:
        """The caller's stream will read the tensor: its memory must not be reused before that is done."""

    def finish(self, event: Any, deadline: float, clock: Clock) -> None:
        """Waits until the event happened. Raises StoreTimeoutError."""

    def free(self, tensor: torch.Tensor) -> None:
        """The store lets go of the tensor; leases on it have ended."""


class AcceleratorCopies(CopyEngine):
    """Copies of one accelerator's memory on two streams of their own, one for each direction.

    Implementation notes. Pages that are put are cloned on the caller's stream; pages that come up are allocated
    from the upward stream's pool, so that their memory never waits for the compute stream's queue. Whoever
    reads a page on another stream says so by `record_stream`, and the caching allocator then keeps the block
    until that stream passed the point of release. A copy down is waited for by its worker thread before the
    source is let go, so it needs no such mark.
    Rejected: one stream (a read would queue behind writes); allocation on the compute stream (each promotion
    would wait for everything computed so far).
    """

    late = True

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._up = torch.Stream(device)
        self._down = torch.Stream(device)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Memory from the upward stream's pool."""
        with self._up:
            return torch.empty(shape, dtype=dtype, device=device)

    def mark(self, tensor: torch.Tensor) -> Any:
        """An event on the caller's current stream."""
        event = torch.Event(self._device)
        event.record(torch.accelerator.current_stream(self._device))
        return event

    def to_host(self, source: torch.Tensor, out: torch.Tensor, after: Any) -> Any:
        """Copies on the downward stream; truly late only where `out` is page-locked."""
        if after is not None:
            self._down.wait_event(after)
        with self._down:
            out.copy_(source, non_blocking=True)
        event = torch.Event(self._device)
        event.record(self._down)
        return event

    def to_device(self, source: torch.Tensor, out: torch.Tensor) -> Any:
        """Copies on the upward stream."""
        with self._up:
            out.copy_(source, non_blocking=True)
        event = torch.Event(self._device)
        event.record(self._up)
        return event

    def wait(self, event: Any, tensor: torch.Tensor) -> None:
        """Makes the current stream wait for the event."""
        if event is not None:
            torch.accelerator.current_stream(self._device).wait_event(event)

    def use(self, tensor: torch.Tensor) -> None:
        """Keeps the memory until the current stream is past the moment of release."""
        tensor.record_stream(torch.accelerator.current_stream(self._device))

    def finish(self, event: Any, deadline: float, clock: Clock) -> None:
        """Polls the event: a wait inside the driver would have no deadline."""
        if event is None:
            return
        spins, pause_s = _SPINS, _SLEEPS_S[0]
        while not event.query():
            if spins:
                spins -= 1
                continue
            if clock.now() > deadline:
                raise StoreTimeoutError(
                    "a copy between device and host did not end", remedy="raise timeout_s"
                )
            clock.sleep(pause_s)
            pause_s = min(2 * pause_s, _SLEEPS_S[1])


class Engines:
    """The copy engine of each device, made when it is first needed.

    Args:
        accelerator: None, a device, or one engine for every tensor.
    """

    def __init__(self, accelerator: CopyEngine | torch.device | str | None) -> None:
        self._cpu = CopyEngine()
        self._all = accelerator if isinstance(accelerator, CopyEngine) else None
        self._late: dict[torch.device, CopyEngine] = {}
        if accelerator is not None and self._all is None:
            self._require(torch.device(accelerator))  # type: ignore[arg-type]

    def _require(self, device: torch.device) -> None:
        current = torch.accelerator.current_accelerator(check_available=True)
        if current is None or current.type != device.type:
            raise ConfigError("accelerator: torch sees no such device", got=str(device), limit=str(current))

    @property
    def any_late(self) -> bool:
        """Whether pages can lie in a device's own memory on this machine."""
        return self._all is not None or torch.accelerator.is_available()

    def of(self, device: torch.device) -> CopyEngine:
        """The engine for tensors of that device."""
        if self._all is not None:
            return self._all
        if device.type == "cpu":
            return self._cpu
        engine = self._late.get(device)
        if engine is None:
            self._require(device)
            engine = self._late[device] = AcceleratorCopies(device)
        return engine
