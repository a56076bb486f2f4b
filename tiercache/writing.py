"""Puts: a page into the highest tier that has, or can be given, room for it."""

from __future__ import annotations

import torch

from tiercache.coding import PageCodecs
from tiercache.demote import Demotion, PageGone
from tiercache.entry import Entry, PageKey, Place
from tiercache.errors import InputError, PageStateError, TierFullError
from tiercache.keeper import Keeper
from tiercache.payload import Source
from tiercache.stalls import stalling
from tiercache.transfer import Transfer, is_plain


class Puts:
    """Writes new pages; a page is visible once all its bytes are in one place, and never before."""

    def __init__(
        self, transfer: Transfer, codecs: PageCodecs, demotion: Demotion, keeper: Keeper, timeout_s: float
    ) -> None:
        self._transfer = transfer
        self._books = transfer.books
        self._codecs = codecs
        self._demotion = demotion
        self._keeper = keeper
        self._timeout_s = timeout_s

    def begin(
        self, key: PageKey, tensor: torch.Tensor, *, persistent: bool
    ) -> tuple[Entry, Place | None] | None:
        """A new entry, with room on the device if that is free; None when the page is there. The lock is held.

        A page that the device's admission refuses gets none.
        """
        books = self._books
        entry = books.table.get(key)
        if entry is not None and not self._join(entry, tensor):
            return None
        entry = Entry(key, tensor.dtype, tuple(tensor.shape), tensor.device, len(books.tiers))
        entry.coding = self._codecs.of(key)
        entry.persistent = persistent
        books.enter(entry)
        entry.refused = books.last > 0 and not books.admits(entry, 0, entry.num_bytes)
        place = None if entry.refused else books.reserve(0, entry.num_bytes)
        if place is not None:
            entry.begin(0, place)
        return entry, place

    def _join(self, entry: Entry, tensor: torch.Tensor) -> bool:
        """Adds a reference to a page that is there; True when the page went away while its first put failed."""
        books, key = self._books, entry.key
        deadline = books.clock.now() + self._timeout_s
        while not entry.visible or entry.busy:
            books.wait(deadline, f"put {key}")
            found = books.table.get(key)
            if found is None:
                return True
            entry = found
        if entry.is_sum:
            raise PageStateError(f"put {key}: the page is a sum", remedy="take or discard it first")
        if entry.dtype != tensor.dtype or entry.shape != tuple(tensor.shape):
            raise PageStateError(
                f"put {key}: a page of another dtype or shape has this key",
                got=f"{tensor.dtype} {tuple(tensor.shape)}",
                limit=f"{entry.dtype} {entry.shape}",
            )
        entry.refs += 1
        return False

    def fill(self, entry: Entry, place: Place | None, tensor: torch.Tensor, *, own: bool) -> None:
        """Brings the new page's bytes to where they fit; outside the lock. After an error it was never there."""
        books = self._books
        try:
            if place is None:
                place = self._make_room(entry, tensor)
            if place is not None:
                self._fill_device(entry, place, tensor, own=own)
        except BaseException as error:
            with books.changed:
                if entry.places[0] is not None and not entry.places[0].valid:
                    books.abort(entry, 0)
                books.bury(entry)
            if isinstance(error, PageGone):
                return
            raise
        with books.changed:
            if place is not None:
                books.publish(entry, 0)
            entry.visible = True
            books.counts.puts += 1
            if entry.persistent:
                self._keeper.keep(entry)
            books.settle(entry)
            books.notify()

    def _make_room(self, entry: Entry, tensor: torch.Tensor) -> Place | None:
        """Room on the device; None after the page went straight to a tier below, where demotion can't make any."""
        books = self._books
        deadline = books.clock.now() + self._timeout_s
        with stalling(books, "put", entry.key):
            try:
                if entry.refused and self._put_refused(entry, tensor, deadline):
                    return None
                place = self._demotion.room.acquire(0, entry.num_bytes, f"put {entry.key}", deadline)
            except TierFullError as full:
                if books.last == 0:
                    raise
                self._put_below(entry, tensor, deadline, full)
                return None
        with books.changed:
            if entry.dead:
                books.release_room(0, place)
                raise PageGone
            entry.begin(0, place)
        return place

    def _put_refused(self, entry: Entry, tensor: torch.Tensor, deadline: float) -> bool:
        """Whether a page that the device refuses found room below; if not, the device takes it all the same."""
        with self._books.changed:
            full = self._demotion.room.full(0, entry.num_bytes, f"put {entry.key}")
        try:
            self._put_below(entry, tensor, deadline, full)
        except TierFullError:
            return False
        return True

    def _put_below(self, entry: Entry, tensor: torch.Tensor, deadline: float, full: TierFullError) -> None:
        tensor = tensor.detach()
        ready = self._books.engines.of(entry.device).mark(tensor)
        source_for = self._transfer.tensor_source
        error: TierFullError = full
        for level in self._demotion.order_below(entry, 0):
            try:
                with source_for(entry, tensor, ready, level, deadline, again=False) as source:
                    self._demotion.land(entry, 0, level, source, deadline)
            except TierFullError as below:
                error = below.with_traceback(None)  # whose frames would keep the page's memory
                continue
            return
        raise error

    def _write_through(self, entry: Entry, source: Source, deadline: float) -> None:
        """Keeps a first encode that cannot be had again, in the first tier of its codec with room to be had at once.

        Where none has any the page goes down as raw bytes later.
        """
        books, fixes = self._books, entry.coding.fixes
        for level in range(1, books.last + 1):
            if entry.coding.at(books.tiers[level]) is not fixes:
                continue
            try:
                self._demotion.land(entry, 0, level, source, deadline, behind=True)
            except TierFullError:
                continue
            return

    def _fill_device(self, entry: Entry, place: Place, tensor: torch.Tensor, *, own: bool) -> None:
        engine = self._books.engines.of(entry.device)
        if entry.coding.fixes is not None:
            deadline = self._books.clock.now() + self._timeout_s

            def write_through(source: Source) -> None:
                self._write_through(entry, source, deadline)

            place.tensor = self._transfer.fix(entry, tensor.detach(), deadline, write_through)
            if place.tensor is None:
                entry.coding = entry.coding.exact()
        if place.tensor is None:
            keep = own and may_keep(tensor, entry.num_bytes)
            place.tensor = tensor.detach() if keep else engine.clone(tensor.detach(), entry.dtype)
        place.ready = engine.mark(place.tensor)


def check_page(tensor: torch.Tensor, what: str) -> None:
    """Raises InputError unless the tensor is one that the store can keep as bytes."""
    if not isinstance(tensor, torch.Tensor) or tensor.layout != torch.strided or tensor.is_quantized:
        kind = getattr(tensor, "layout", type(tensor).__name__)
        raise InputError(f"{what}: not a dense tensor", got=kind, remedy="put strided tensors")


def may_keep(tensor: torch.Tensor, num_bytes: int) -> bool:
    """Whether a tensor that is handed over is all there is in its memory."""
    return is_plain(tensor) and tensor.untyped_storage().nbytes() <= num_bytes + 512
