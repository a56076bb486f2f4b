"""One forward's saved tensors: packed, moved when there is no room, and brought back."""

from __future__ import annotations

import os
import threading
from collections import deque
from typing import Any

import torch

from tiercache.entry import PageKey
from tiercache.errors import PageMissingError, StoreTimeoutError
from tiercache.runtime.memory import release_free_memory
from tiercache.runtime.offloading.exempt import Kept, is_kept
from tiercache.runtime.offloading.loan import Loan
from tiercache.runtime.offloading.order import UnpackOrder
from tiercache.runtime.offloading.payload import Packer
from tiercache.runtime.offloading.storages import MOVING, RESIDENT, STORED, Handle, SavedStorage, View
from tiercache.runtime.offloading.window import Window
from tiercache.store import TierStore

_NODE = b"saved tensors".ljust(32, b"\0")
_AHEAD = 4
# Freed memory goes back to the system each time that a quarter of the budget was freed and not taken up again, within
# these bounds.
_TRIM_BYTES = (1 << 20, 256 << 20)


class Session:
    """The saved tensors of the graphs built under one entry of the context.

    Implementation notes. A storage is handed to the store only while nobody but the graph holds it. So the store
    can take it without a copy, its bytes can't change on the way, and moving it frees memory. Whatever else holds
    a storage (module, batch, caller) would keep it here anyway. One lock guards the books; copies run outside
    it, with the storage marked as moving. Handles die at any time, in any thread, even inside this class when the
    garbage collector runs: they are queued without a lock, and cleared by whoever holds the lock next.

    Args:
        store: where storages go.
        min_bytes: storages below this stay.
        limit_bytes: what may stay resident; None for what the device budget allows.
        packer: makes pages of bytes.
        learned: the order in which an earlier graph was unpacked.

    Attributes:
        moved_bytes: bytes that were handed to the store, before bits and compression.
        stored_bytes: bytes that the store was given for them.
    """

    def __init__(
        self,
        store: TierStore,
        *,
        min_bytes: int,
        limit_bytes: int | None,
        packer: Packer,
        learned: list[int] | None = None,
    ) -> None:
        self._store = store
        self._graph = store.new_graph()
        self._min_bytes = min_bytes
        self._packer = packer
        self._pid = os.getpid()
        self._changed = threading.Condition(threading.Lock())
        self._here: dict[int, SavedStorage] = {}
        self._there: dict[int, SavedStorage] = {}
        self._next = 0
        self._dead: deque[tuple[SavedStorage, View]] = deque()
        self._garbage: list[PageKey] = []
        self.window = Window()
        self.loan = Loan(store, limit_bytes)
        self.order = UnpackOrder(learned)
        self._freed_bytes = 0
        self._trim_bytes = min(max(store.config.device_bytes // 4, _TRIM_BYTES[0]), _TRIM_BYTES[1])
        self.moved_bytes = 0
        self.stored_bytes = 0

    # The hooks

    def pack(self, tensor: torch.Tensor) -> Any:
        """What the graph keeps instead of a saved tensor."""
        if is_kept(tensor, self._min_bytes):
            return Kept(tensor)
        view = View(tensor)
        with self._changed:
            storage = tensor.untyped_storage()
            saved = self._here.get(storage._cdata)  # noqa: SLF001
            if saved is None:
                saved = SavedStorage(self, self._next, storage)
                self._next += 1
                saved.views.append(view)
                self._enter(saved)
            else:
                view.offset += saved.start // view.dtype.itemsize
                saved.views.append(view)
        handle = Handle(saved, view)
        del storage
        self.make_room()
        return handle

    @staticmethod
    def unpack(packed: Any) -> torch.Tensor:
        """The saved tensor. Raises SavedTensorChangedError when it was changed meanwhile."""
        if isinstance(packed, Handle):
            session: Session = packed.saved.session
            return session.restore(packed.saved, packed.view)
        assert isinstance(packed, Kept)
        return packed.get()

    # Moving

    def make_room(self, *, look_at_all: bool = False) -> None:
        """Moves storages, first saved first, until what is resident is within its limit."""
        self._collect()
        window, loan = self.window, self.loan
        if look_at_all or window.used_bytes > loan.lent_bytes:
            with self._changed:
                loan.fit(window.used_bytes)
                if look_at_all or window.used_bytes > loan.limit_bytes:
                    window.look_again(all_of_them=look_at_all)
                    loan.fit(window.used_bytes)
        self._move_excess()

    def _move_excess(self) -> None:
        if self._freed_bytes > self._trim_bytes and self.moved_bytes:
            # Freed blocks that the C library keeps would stay resident beside what replaced them. Those that the next
            # layer takes up again are worth more here: each page of memory that went back has to be zeroed again.
            self._freed_bytes = 0
            release_free_memory(torch.device("cpu"))
        while self.window.used_bytes > self.loan.limit_bytes:
            with self._changed:
                saved = self.window.next_to_move()
                if saved is None:
                    return
                flat = saved.detach()
                self._leave(saved)
                saved.state = MOVING
            self._move(saved, flat)
            del flat

    def _move(self, saved: SavedStorage, flat: torch.Tensor) -> None:
        try:
            page, saved.decode = self._packer.encode(flat, {view.dtype for view in saved.views})
            num_bytes = page.numel() * page.element_size()
            self._store.put(self._key(saved), page, own=True)
            del page
        except BaseException:
            with self._changed:
                saved.attach(flat)
                self._enter(saved)
            self._collect()
            raise
        with self._changed:
            self.moved_bytes += flat.numel()
            self.stored_bytes += num_bytes
            self._put_away(saved)
        self._collect()

    def restore(self, saved: SavedStorage, view: View) -> torch.Tensor:
        """The tensor of a view, brought back from the store if need be."""
        with self._changed:
            self.order.note(saved.sequence)
            while saved.state == MOVING:
                if not self._changed.wait(self._store.config.timeout_s):
                    raise StoreTimeoutError(f"unpack {self._key(saved)}: another thread moves it")
            ahead = self._ahead(saved)
            resident = saved.state == RESIDENT
            if resident:
                tensor = saved.tensor(view)
            else:
                self.order.remove(saved.sequence)
                del self._there[saved.sequence]
                saved.state = MOVING
        if not resident:
            tensor = self._bring_back(saved, view, ahead)
        elif ahead:
            self._store.prefetch(ahead)
        self._collect()
        self._move_excess()
        return tensor

    def _bring_back(self, saved: SavedStorage, view: View, ahead: list[PageKey]) -> torch.Tensor:
        """The tensor of a view whose storage this thread marked as moving; the next ones are asked for first."""
        try:
            view.check(view.seen)
            if ahead:
                self._store.prefetch(ahead)
            page = self._store.take(self._key(saved))
            if page is None:
                raise PageMissingError(
                    f"unpack {self._key(saved)}: the page is gone: discarded, or damaged and found out when it came up",
                    remedy="run forward again",
                )
            assert saved.decode is not None
            flat = saved.decode(page)
            del page
        except BaseException:
            with self._changed:
                self._put_away(saved)
            self._collect()
            raise
        with self._changed:
            saved.attach(flat)
            del flat
            self._enter(saved)
            if saved.on_host:
                self._freed_bytes = max(0, self._freed_bytes - saved.num_bytes)
            tensor = saved.tensor(view)
            missing_bytes = self.loan.cover(self.window.used_bytes)
        if missing_bytes:
            slot = self._store.lend(missing_bytes, evict=True)
            with self._changed:
                self.loan.add(slot, self.window.used_bytes)
        return tensor

    def _ahead(self, saved: SavedStorage) -> list[PageKey]:
        """Pages that are needed soon and not asked for yet: one, or as many as have room beside what is resident."""
        keys: list[PageKey] = []
        left_bytes = self._store.config.device_bytes // 8
        for sequence in self.order.upcoming(saved.sequence, _AHEAD) if self._there else ():
            coming = self._there[sequence]
            left_bytes -= coming.num_bytes
            if keys and left_bytes < 0:
                break
            if not coming.wanted:
                coming.wanted = True
                keys.append(self._key(coming))
        return keys

    # The books; the lock is held

    def _enter(self, saved: SavedStorage) -> None:
        saved.state = RESIDENT
        self._here[saved.cdata] = saved
        self.window.add(saved)
        self._settle(saved)

    def _leave(self, saved: SavedStorage) -> None:
        del self._here[saved.cdata]
        self.window.remove(saved)
        self.loan.shrink(self.window.used_bytes)
        if saved.on_host:
            self._freed_bytes += saved.num_bytes

    def _put_away(self, saved: SavedStorage) -> None:
        saved.state, saved.wanted = STORED, False
        self._there[saved.sequence] = saved
        self.order.add(saved.sequence)
        self._settle(saved)

    def _settle(self, saved: SavedStorage) -> None:
        """A storage came to rest: those who wait for it may go on; if its last view died meanwhile, it ends."""
        if not saved.views:
            self._drop(saved)
        self._changed.notify_all()

    def _key(self, saved: SavedStorage) -> PageKey:
        return PageKey(_NODE, saved.sequence, "saved_tensor", self._graph)

    # The end of handles

    def forget(self, saved: SavedStorage, view: View) -> None:
        """A handle died. Called from finalizers: never waits, and does nothing in a forked child."""
        if os.getpid() == self._pid:
            self._dead.append((saved, view))
            self._collect()

    def _collect(self) -> None:
        """Drops what no handle needs, unless somebody holds the lock, who will do it afterwards."""
        while (self._dead or self._garbage) and self._changed.acquire(blocking=False):
            try:
                while self._dead:
                    saved, view = self._dead.popleft()
                    saved.views.remove(view)
                    view.alias = None
                    if not saved.views and saved.state != MOVING:
                        self._drop(saved)
                keys, self._garbage = self._garbage, []
            finally:
                self._changed.release()
            if keys:
                self._store.discard_later(keys)

    def _drop(self, saved: SavedStorage) -> None:
        if saved.state == RESIDENT:
            self._leave(saved)
            saved.base = None
        else:
            del self._there[saved.sequence]
            self.order.remove(saved.sequence)
            self._garbage.append(self._key(saved))
