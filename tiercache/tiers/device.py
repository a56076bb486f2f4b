"""The device tier: a budget over tensors on the compute device, or in RAM where there is none."""

from __future__ import annotations

import threading

import torch

from tiercache.errors import PageStateError, TierFullError
from tiercache.tiers.base import ByteArray, PageMeta, Slot, Tier


class DeviceTier(Tier):
    """Counts the bytes of tensors; the store keeps the tensors themselves, each with its page.

    Through the tier contract alone (`write`, `read`) a slot holds its bytes on `device`.
    """

    name = "device"

    def __init__(self, capacity_bytes: int, *, device: torch.device | str = "cpu") -> None:
        self._capacity_bytes = capacity_bytes
        self._device = torch.device(device)
        self._lock = threading.Lock()
        self._used_bytes = 0
        self._next = 0
        self._live: dict[int, int] = {}
        self._bytes: dict[int, torch.Tensor] = {}

    @property
    def capacity_bytes(self) -> int:
        """Budget."""
        return self._capacity_bytes

    @property
    def used_bytes(self) -> int:
        """Bytes of all slots."""
        return self._used_bytes

    def reserve(self, num_bytes: int) -> Slot:
        """Room for a tensor of `num_bytes`, to be allocated after. Raises TierFullError."""
        with self._lock:
            if self._used_bytes + num_bytes > self._capacity_bytes:
                raise TierFullError(
                    f"device tier: {num_bytes} bytes do not fit",
                    got=f"{num_bytes} bytes",
                    limit=f"{self._capacity_bytes - self._used_bytes} free of {self._capacity_bytes}",
                    remedy="raise device or end leases",
                )
            self._next += 1
            self._live[self._next] = num_bytes
            self._used_bytes += num_bytes
            return Slot(self._next, num_bytes)

    def write(self, slot: Slot, data: ByteArray, meta: PageMeta) -> None:
        """Copies `data` to the device."""
        if data.size != meta.stored_bytes or data.size > slot.num_bytes:
            raise PageStateError("device tier: write of another size", got=data.size, limit=slot.num_bytes)
        self._bytes[slot.handle] = torch.from_numpy(data).to(self._device, copy=True)

    def read(self, slot: Slot, out: ByteArray, meta: PageMeta) -> None:
        """Copies the slot's bytes to `out`."""
        if out.size != meta.stored_bytes or slot.handle not in self._bytes:
            raise PageStateError("device tier: read of another size", got=out.size, limit=meta.stored_bytes)
        torch.from_numpy(out).copy_(self._bytes[slot.handle][: out.size])

    def free(self, slot: Slot) -> None:
        """Ends a slot."""
        with self._lock:
            self._used_bytes -= self._live.pop(slot.handle)
            self._bytes.pop(slot.handle, None)

    def check_integrity(self) -> None:
        """Raises AssertionError when the slots do not add up."""
        with self._lock:
            assert sum(self._live.values()) == self._used_bytes <= self._capacity_bytes
            assert self._bytes.keys() <= self._live.keys()

    def close(self) -> None:
        """Lets go of every tensor."""
        with self._lock:
            self._bytes.clear()
            self._live.clear()
            self._used_bytes = 0
