"""Sums: pages that change in place."""

from __future__ import annotations

import torch

from tiercache.entry import Entry, PageKey, Place, Rise
from tiercache.errors import InputError, PageStateError, TierFullError
from tiercache.payload import as_tensor, is_addressable
from tiercache.placement import Books
from tiercache.promote import Promotion
from tiercache.room import Room
from tiercache.stalls import stalling
from tiercache.taking import idle_entry
from tiercache.transfer import Transfer


class Sums:
    """Adds to sums where they live. Its methods run outside the lock.

    An entry is `busy` while one thread changes or removes it; its place is pinned as for a copy, so it is not
    chosen as a victim, and everybody else waits.
    """

    def __init__(self, transfer: Transfer, room: Room, promotion: Promotion, timeout_s: float) -> None:
        self._transfer = transfer
        self._books: Books = transfer.books
        self._room = room
        self._promotion = promotion
        self._timeout_s = timeout_s
        # Levels whose memory can be added to in place: the device, and host memory below it.
        tiers = self._books.tiers
        self._in_place = [0, 1] if len(tiers) > 1 and is_addressable(tiers[1]) else [0]

    def add(self, key: PageKey, tensor: torch.Tensor) -> None:
        """Adds `tensor` to a sum, which is created when absent."""
        deadline = self._books.clock.now() + self._timeout_s
        late = self._books.engines.of(tensor.device).late
        while not self._try(key, tensor, None if late else tensor, deadline):
            # Staging is borrowed before anything below the device is taken hold of: see Staging.
            with self._transfer.host_copy(tensor, deadline, f"accumulate {key}") as addend:
                if self._try(key, tensor, addend, deadline):
                    return

    def _try(self, key: PageKey, tensor: torch.Tensor, addend: torch.Tensor | None, deadline: float) -> bool:
        """Adds a tensor; False when staging must be borrowed for it, or given back, before that can be done.

        `addend`: the same in host memory, when it is there.
        """
        books = self._books
        while True:
            with books.changed:
                entry = idle_entry(books, key, "accumulate", deadline)
                if entry is None:
                    entry, level = self._new(key, tensor), -1
                else:
                    check_addend(entry, tensor)
                    source = entry.source()
                    assert source is not None
                    level = source
                    in_place = level in self._in_place
                    if in_place and level > 0 and addend is None:
                        return False
                    if not in_place and addend is not None and addend is not tensor:
                        return False
                    if in_place:
                        place = entry.places[level]
                        assert place is not None
                        books.pin(entry, place, level, copy=True)
                    entry.busy = True
            if level < 0:
                return self._create(entry, tensor, addend, deadline)
            if in_place:
                self._add_at(entry, level, tensor if level == 0 else addend)
                return True
            self._raise_sum(entry, deadline)

    def _new(self, key: PageKey, tensor: torch.Tensor) -> Entry:
        entry = Entry(
            key, dtype_of_sum(tensor), tuple(tensor.shape), tensor.device, len(self._books.tiers), is_sum=True
        )
        entry.busy = True
        self._books.enter(entry)
        return entry

    def _create(
        self, entry: Entry, tensor: torch.Tensor, addend: torch.Tensor | None, deadline: float
    ) -> bool:
        """Makes a new sum of its first addend; where nothing has room it was never there."""
        books = self._books
        try:
            found = self._room_for(entry, tensor, addend, deadline)
            if found is None:
                self._forget(entry)
                return False
            level, place = found
            with books.changed:
                entry.begin(level, place)
            try:
                self._begin_at(entry, level, place, tensor if level == 0 else addend)
            except BaseException:
                with books.changed:
                    books.abort(entry, level)
                raise
        except BaseException:
            self._forget(entry)
            raise
        with books.changed:
            books.publish(entry, level)
            self._settle(entry)
            entry.visible = True
            books.counts.puts += 1
        return True

    def _forget(self, entry: Entry) -> None:
        with self._books.changed:
            entry.busy = False
            self._books.bury(entry)

    def _begin_at(self, entry: Entry, level: int, place: Place, first: torch.Tensor | None) -> None:
        assert first is not None
        if level == 0:
            engine = self._books.engines.of(entry.device)
            place.tensor = engine.clone(first, entry.dtype)
            place.ready = engine.mark(place.tensor)
        else:
            place.meta = self._transfer.raw_meta(entry)
            self._total(entry, level, place).copy_(first)

    def _room_for(
        self, entry: Entry, tensor: torch.Tensor, addend: torch.Tensor | None, deadline: float
    ) -> tuple[int, Place] | None:
        """Free room on the device, else in host memory; else whatever eviction can make, from the device down.

        None when only host memory may have room and the addend is not there.
        """
        books = self._books
        levels = self._in_place if addend is not None else [0]
        with books.changed:
            for level in levels:
                place = books.reserve(level, entry.num_bytes)
                if place is not None:
                    return level, place
        with stalling(books, "accumulate", entry.key):
            return self._wait_for_room(entry, tensor, addend, deadline)

    def _wait_for_room(
        self, entry: Entry, tensor: torch.Tensor, addend: torch.Tensor | None, deadline: float
    ) -> tuple[int, Place] | None:
        levels = self._in_place if addend is not None else [0]
        if addend is tensor:
            return self._make_room(entry, deadline)
        # Of a device's tensor. Once it is staged, eviction on the device has failed already.
        level = levels[-1]
        try:
            return level, self._room.acquire(level, entry.num_bytes, f"accumulate {entry.key}", deadline)
        except TierFullError:
            if addend is not None or len(self._in_place) == 1:
                raise
            return None

    def _make_room(self, entry: Entry, deadline: float) -> tuple[int, Place]:
        # On the CPU host memory is as good as the device's budget, and is not what pages are read through.
        late = self._books.engines.of(entry.device).late
        order = self._in_place if late else self._in_place[::-1]
        for level in order:
            try:
                place = self._room.acquire(level, entry.num_bytes, f"accumulate {entry.key}", deadline)
            except TierFullError:
                if level == order[-1]:
                    raise
            else:
                return level, place
        raise AssertionError("the device takes sums")

    def _add_at(self, entry: Entry, level: int, addend: torch.Tensor | None) -> None:
        """Adds in place at a level that this thread has pinned."""
        books = self._books
        place = entry.places[level]
        assert place is not None
        assert addend is not None
        try:
            if level == 0:
                assert place.tensor is not None
                engine = books.engines.of(entry.device)
                engine.wait(place.ready, place.tensor)
                engine.use(place.tensor)
                engine.add(place.tensor, addend)
                place.ready = engine.mark(place.tensor)
            else:
                self._total(entry, level, place).add_(addend)
        finally:
            with books.changed:
                books.unpin(entry, place, level, copy=True)
                if entry.places[level] is place:
                    books.use(entry, level)
                self._settle(entry)

    def _total(self, entry: Entry, level: int, place: Place) -> torch.Tensor:
        """A sum in the memory of a tier below the device."""
        view = self._books.tiers[level].view(place.slot)
        assert view is not None, f"level {level} is not addressable"
        return as_tensor(view[: entry.num_bytes], entry.dtype, entry.shape)

    def _raise_sum(self, entry: Entry, deadline: float) -> None:
        """Brings a sum up from where it cannot be added to, and lets others at it again."""
        books = self._books
        try:
            with stalling(books, "accumulate", entry.key):
                level, place = self._make_room(entry, deadline)
                with books.changed:
                    rise = Rise(level)
                    rise.place, rise.started = place, True
                    entry.rise = rise
                self._promotion.lift(entry, rise, deadline, keep=False)
        finally:
            with books.changed:
                self._settle(entry)

    def _settle(self, entry: Entry) -> None:
        entry.busy = False
        self._books.settle(entry)
        self._books.notify()


def dtype_of_sum(tensor: torch.Tensor) -> torch.dtype:
    """The dtype of a sum that begins with this addend."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def check_addend(entry: Entry, tensor: torch.Tensor) -> None:
    """Raises unless `tensor` can be added to the sum."""
    if not entry.is_sum:
        raise PageStateError(f"accumulate {entry.key}: the page was put and is immutable")
    if tuple(tensor.shape) != entry.shape or tensor.device != entry.device:
        raise InputError(
            f"accumulate {entry.key}: the sum has another shape or device",
            got=f"{tuple(tensor.shape)} on {tensor.device}",
            limit=f"{entry.shape} on {entry.device}",
        )
    if tensor.dtype == torch.float64 and entry.dtype != torch.float64:
        raise InputError(
            f"accumulate {entry.key}: an fp64 addend would be rounded",
            got=tensor.dtype,
            limit=entry.dtype,
            remedy="begin the sum with an fp64 tensor",
        )
