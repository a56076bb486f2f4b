"""The lease: a promise that a page stays where it is while it is in use."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Self

import torch

from tiercache.errors import PageStateError


class Lease:
    """A promise that a page stays on its device, unmoved and unchanged, until `release`.

    A context manager whose value is the lease. Releasing twice does nothing.
    """

    __slots__ = ("_release", "_tensor")

    def __init__(self, tensor: torch.Tensor, release: Callable[[], None]) -> None:
        self._tensor: torch.Tensor | None = tensor
        self._release: Callable[[], None] | None = release

    @property
    def tensor(self) -> torch.Tensor:
        """The page, on the device it was put from: the store's own memory, read-only by convention."""
        if self._tensor is None:
            raise PageStateError("read: the lease has ended", remedy="use the tensor before release()")
        return self._tensor

    def release(self) -> None:
        """Ends the lease."""
        release, self._release, self._tensor = self._release, None, None
        if release is not None:
            release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def __del__(self) -> None:
        self.release()
