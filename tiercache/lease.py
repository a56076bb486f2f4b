"""The lease: a promise that a page stays where it is while it is in use."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING, Self

import torch

from tiercache.errors import PageStateError

if TYPE_CHECKING:
    from tiercache.entry import Entry, Place
    from tiercache.reading import Leases


class Lease:
    """A promise that a page stays on its device, unmoved and unchanged, until `release`.

    A context manager whose value is the lease. Releasing twice does nothing; a lease that is forgotten ends when
    it is collected.
    """

    __slots__ = ("_entry", "_leases", "_place", "_tensor", "_thread")

    def __init__(self, tensor: torch.Tensor, entry: Entry, place: Place, thread: int, leases: Leases) -> None:
        self._tensor: torch.Tensor | None = tensor
        self._entry = entry
        self._place = place
        self._thread = thread
        self._leases = leases

    @property
    def tensor(self) -> torch.Tensor:
        """The page, on the device it was put from: the store's own memory, read-only by convention."""
        if self._tensor is None:
            raise PageStateError("read: the lease has ended", remedy="use the tensor before release()")
        return self._tensor

    def release(self) -> None:
        """Ends the lease."""
        if self._tensor is not None:
            self._tensor = None
            self._leases.end(self._entry, self._place, self._thread)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def __del__(self) -> None:
        # A collection may run while this very thread holds the store's lock, so the end is left to others.
        if getattr(self, "_tensor", None) is not None:
            self._tensor = None
            self._leases.end_later(self._entry, self._place, self._thread)
