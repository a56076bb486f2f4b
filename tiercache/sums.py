"""Sums and hand-overs: pages that change in place, and pages that leave the store."""

from __future__ import annotations

import torch

from tiercache.entry import Entry, PageKey, Place, Rise
from tiercache.errors import InputError, PageStateError, TierFullError
from tiercache.payload import as_tensor, is_addressable
from tiercache.placement import Books
from tiercache.promote import Promotion
from tiercache.room import Room
from tiercache.transfer import Transfer


class Sums:
    """Adds to sums where they live, and takes pages out. Its methods run outside the lock.

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
        books = self._books
        start_s = books.clock.now()
        deadline = start_s + self._timeout_s
        while True:
            with books.changed:
                entry = self._idle(key, f"accumulate {key}", deadline)
                if entry is None:
                    entry = self._new(key, tensor)
                    level = -1
                else:
                    check_addend(entry, tensor)
                    source = entry.source()
                    assert source is not None
                    level = source
                    if level in self._in_place:
                        place = entry.places[level]
                        assert place is not None
                        books.pin(entry, place, level, copy=True)
                    entry.busy = True
            if level < 0:
                self._create(entry, tensor, deadline)
                return
            if level in self._in_place:
                self._add_at(entry, level, tensor, deadline)
                return
            self._raise_sum(entry, deadline)

    def _idle(self, key: PageKey, what: str, deadline: float) -> Entry | None:
        """The entry once no thread changes or moves it; the lock is held."""
        books = self._books
        while True:
            entry = books.table.get(key)
            if entry is None:
                return None
            if entry.leases:
                raise PageStateError(f"{what}: the page is leased", remedy="end the lease first")
            moving = any(place is not None and (place.pins or not place.valid) for place in entry.places)
            if entry.visible and not entry.busy and entry.rise is None and not moving:
                return entry
            rise = entry.rise
            if rise is not None and not rise.started:
                books.abandon(entry, rise, PageStateError(f"{what}: changed before it came up"))
                continue
            books.wait(deadline, what)

    def _new(self, key: PageKey, tensor: torch.Tensor) -> Entry:
        entry = Entry(
            key, dtype_of_sum(tensor), tuple(tensor.shape), tensor.device, len(self._books.tiers), is_sum=True
        )
        entry.busy = True
        self._books.enter(entry)
        return entry

    def _create(self, entry: Entry, tensor: torch.Tensor, deadline: float) -> None:
        """Makes a new sum of its first addend; where nothing has room it was never there."""
        books = self._books
        try:
            level, place = self._room_for(entry, deadline)
            with books.changed:
                entry.begin(level, place)
            try:
                if level == 0:
                    engine = books.engines.of(entry.device)
                    place.tensor = engine.clone(tensor, entry.dtype)
                    place.ready = engine.mark(place.tensor)
                else:
                    self._write_host(entry, level, place, tensor, deadline, first=True)
            except BaseException:
                with books.changed:
                    books.abort(entry, level)
                raise
        except BaseException:
            with books.changed:
                entry.busy = False
                books.bury(entry)
            raise
        with books.changed:
            books.publish(entry, level)
            self._settle(entry)
            entry.visible = True
            books.counts.puts += 1

    def _room_for(self, entry: Entry, deadline: float) -> tuple[int, Place]:
        """Free room on the device, else in host memory; else whatever eviction can make, from the device down."""
        books = self._books
        with books.changed:
            for level in self._in_place:
                place = books.reserve(level, entry.num_bytes)
                if place is not None:
                    return level, place
        return self._make_room(entry, deadline)

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

    def _add_at(self, entry: Entry, level: int, tensor: torch.Tensor, deadline: float) -> None:
        """Adds in place at a level that this thread has pinned."""
        books = self._books
        place = entry.places[level]
        assert place is not None
        try:
            if level == 0:
                assert place.tensor is not None
                engine = books.engines.of(entry.device)
                engine.wait(place.ready, place.tensor)
                engine.use(place.tensor)
                engine.add(place.tensor, tensor)
                place.ready = engine.mark(place.tensor)
            else:
                self._write_host(entry, level, place, tensor, deadline, first=False)
        finally:
            with books.changed:
                books.unpin(entry, place, level, copy=True)
                if entry.places[level] is place:
                    books.use(entry, level)
                self._settle(entry)

    def _write_host(
        self, entry: Entry, level: int, place: Place, tensor: torch.Tensor, deadline: float, *, first: bool
    ) -> None:
        """Adds to, or begins, a sum in the memory of a tier below the device."""
        books = self._books
        engine = books.engines.of(entry.device)
        tier, size = books.tiers[level], entry.num_bytes
        if first:
            place.meta = self._transfer.raw_meta(entry)
        view = tier.view(place.slot)
        assert view is not None, f"the {tier.name} tier is not addressable"
        total = as_tensor(view[:size], entry.dtype, entry.shape)
        if engine.late:
            copy = torch.empty(tensor.shape, dtype=tensor.dtype)
            engine.finish(engine.to_host(tensor, copy, engine.mark(tensor)), deadline, books.clock)
            tensor = copy
        if first:
            total.copy_(tensor)
        else:
            total.add_(tensor)

    def _raise_sum(self, entry: Entry, deadline: float) -> None:
        """Brings a sum up from where it cannot be added to, and lets others at it again."""
        books = self._books
        try:
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

    # Hand-over

    def take(self, key: PageKey) -> torch.Tensor | None:
        """Removes a page and returns its bytes as the caller's own tensor; None when absent."""
        books = self._books
        deadline = books.clock.now() + self._timeout_s
        with books.changed:
            entry = self._idle(key, f"take {key}", deadline)
            if entry is None:
                return None
            level = entry.source()
            assert level is not None
            place = entry.places[level]
            assert place is not None
            engine = books.engines.of(entry.device)
            if level == 0 and entry.refs == 1:
                tensor = place.tensor
                assert tensor is not None
                engine.wait(place.ready, tensor)
                engine.use(tensor)
                place.tensor = None  # handed over, not freed
                books.bury(entry)
                return tensor
            entry.busy = True
            books.pin(entry, place, level, copy=True)
        loose = taken = False
        try:
            tensor, loose = self._copy_out(entry, level, place, deadline)
            taken = True
        finally:
            with books.changed:
                if not loose:
                    books.unpin(entry, place, level, copy=True)
                self._settle(entry)
                if taken:
                    entry.refs -= 1
                    if entry.refs == 0:
                        books.bury(entry)
        return tensor

    def _copy_out(self, entry: Entry, level: int, place: Place, deadline: float) -> tuple[torch.Tensor, bool]:
        engine = self._books.engines.of(entry.device)
        if level == 0:
            assert place.tensor is not None
            engine.wait(place.ready, place.tensor)
            engine.use(place.tensor)
            return engine.clone(place.tensor, entry.dtype), False
        tensor, ready, loose = self._promotion.fetch(entry, level, deadline)
        engine.wait(ready, tensor)
        engine.use(tensor)
        return tensor, loose


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
