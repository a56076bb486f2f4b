"""`offload`: any autograd graph's saved tensors through the store."""

from __future__ import annotations

import threading
from types import TracebackType
from typing import Literal, Self

import torch

from tiercache.config import Size, parse_size
from tiercache.errors import ConfigError
from tiercache.runtime.offloading.payload import Packer
from tiercache.runtime.offloading.session import Session
from tiercache.store import TierStore


def offload(
    store: TierStore, *, min_bytes: Size = "16KiB", keep_last_bytes: Size | Literal["auto"] = "auto"
) -> Offload:
    """A context manager that lets the store keep what autograd saves for backward.

        with tiercache.runtime.offload(store):
            loss = model(x)
        loss.backward()  # inside or outside, once or more, any graph in any order

    Nothing is moved while the device budget has room. Beyond it, what was saved first goes first, each storage once
    however many views of it were saved; parameters, buffers and whatever else somebody besides the graph holds stay
    where they are. Gradients are bit for bit those without the context.

    Args:
        store: an open store. It must stay open until backward is done.
        min_bytes: tensors whose storage is smaller are left alone, and are not counted.
        keep_last_bytes: how much of what was saved last stays where it is; "auto" for all that the store's device
            budget allows.

    Raises:
        ConfigError: a size that cannot be meant, or more than the device budget.
    """
    return Offload(store, min_bytes=min_bytes, keep_last_bytes=keep_last_bytes)


class Offload:
    """What `offload` returns. Each entry is a session of its own; entries may follow, nest, and run in several threads.

    An instance that is used for every step learns in which order backward asks for tensors.

    Attributes:
        last_session: of the entry that ended last.
    """

    def __init__(self, store: TierStore, *, min_bytes: Size, keep_last_bytes: Size | Literal["auto"]) -> None:
        self._store = store
        self._min_bytes = parse_size(min_bytes, "min_bytes")
        device_bytes = store.config.device_bytes
        self._limit_bytes: int | None
        if keep_last_bytes == "auto":
            self._limit_bytes = None
        else:
            self._limit_bytes = parse_size(keep_last_bytes, "keep_last_bytes")
            if self._limit_bytes > device_bytes:
                raise ConfigError(
                    "keep_last_bytes: more than the store's device budget",
                    got=self._limit_bytes,
                    limit=device_bytes,
                    remedy='raise device, or leave it at "auto"',
                )
        self._packer = Packer()
        # Hooks belong to a thread, and so do entries.
        self._entered = threading.local()
        self.last_session: Session | None = None

    def __enter__(self) -> Self:
        session = Session(
            self._store,
            min_bytes=self._min_bytes,
            limit_bytes=self._limit_bytes,
            packer=self._packer,
            learned=self.last_session.order.observed if self.last_session is not None else None,
        )
        hooks = torch.autograd.graph.saved_tensors_hooks(session.pack, session.unpack)
        hooks.__enter__()
        self._stack().append((session, hooks))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        session, hooks = self._stack().pop()
        hooks.__exit__()
        self.last_session = session
        if error is None:
            session.make_room(look_at_all=True)

    def _stack(self) -> list[tuple[Session, torch.autograd.graph.saved_tensors_hooks]]:
        if not hasattr(self._entered, "stack"):
            self._entered.stack = []
        stack: list[tuple[Session, torch.autograd.graph.saved_tensors_hooks]] = self._entered.stack
        return stack
