"""What the offload benchmark compares: contexts around one and the same step."""

from __future__ import annotations

import tempfile
import uuid
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

import tiercache
from tiercache.runtime import offload

CONTENDERS = (
    "none",
    "identity",
    "save_on_cpu",
    "checkpoint",
    "tutorial_disk",
    "ours_unlimited",
    "ours_disk",
    "ours_all",
)


class Contender:
    """A context for each step, and what it has to tell afterwards.

    Args:
        name: one of CONTENDERS; "checkpoint" is in the model, so its context does nothing here.
        folder: for what goes to disk.
        device_bytes: budget of "ours_disk"; the rest goes to disk.
    """

    def __init__(self, name: str, folder: Path, device_bytes: int | None) -> None:
        self.report: dict[str, Any] = {}
        self._close: Callable[[], None] = lambda: None
        self._make: Callable[[], AbstractContextManager[Any]] = nullcontext
        if name == "identity":
            self._make = lambda: saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)
        elif name == "save_on_cpu":
            self._make = lambda: save_on_cpu(pin_memory=torch.cuda.is_available())
        elif name == "tutorial_disk":
            self._tutorial(folder)
        elif name.startswith("ours"):
            self._ours(name, folder, device_bytes)

    def context(self) -> AbstractContextManager[Any]:
        """To be entered around forward and backward."""
        return self._make()

    def finish(self) -> dict[str, Any]:
        """Ends the contender; what it has to report."""
        self._close()
        return self.report

    def _tutorial(self, folder: Path) -> None:
        """The hooks of PyTorch's tutorial on saved tensors: a file for every tensor of 1000 numbers or more."""
        scratch = tempfile.TemporaryDirectory(dir=folder)
        self._close = scratch.cleanup
        self.report["moved_bytes"] = 0

        def pack(tensor: torch.Tensor) -> Any:
            if tensor.numel() < 1000:
                return tensor
            self.report["moved_bytes"] += tensor.numel() * tensor.element_size()
            file = _SelfDeletingFile(Path(scratch.name) / str(uuid.uuid4()))
            torch.save(tensor, file.path)
            return file

        def unpack(packed: Any) -> torch.Tensor:
            return packed if isinstance(packed, torch.Tensor) else torch.load(packed.path)

        self._make = lambda: saved_tensors_hooks(pack, unpack)

    def _ours(self, name: str, folder: Path, device_bytes: int | None) -> None:
        if name == "ours_disk":
            assert device_bytes is not None
            store = tiercache.open_store(
                device=device_bytes, disk=folder / "pages", disk_capacity=max(16 * device_bytes, 1 << 28)
            )
        else:
            store = tiercache.open_store(device="1TiB")
        context = offload(store, keep_last_bytes=0) if name == "ours_all" else offload(store)

        def close() -> None:
            session, stats = context.last_session, store.stats()
            assert session is not None
            self.report |= {
                "moved_bytes": session.moved_bytes,
                "stored_bytes": session.stored_bytes,
                "resident_peak_bytes": session.window.peak_bytes,
                "overshoot_bytes": max(
                    session.loan.overshoot_bytes,
                    *(peak - stats.bytes_capacity[tier] for tier, peak in stats.bytes_peak.items()),
                ),
                "stats": stats.as_dict(),
            }
            store.close()

        self._make, self._close = (lambda: context), close


class _SelfDeletingFile:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __del__(self) -> None:
        self.path.unlink(missing_ok=True)
