"""Copies down: a victim's way to the next tier that can take it."""

from __future__ import annotations

import errno

from tiercache.entry import Entry, Place
from tiercache.errors import TierFullError
from tiercache.payload import Source, is_addressable
from tiercache.room import Room
from tiercache.transfer import Transfer

_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)


class PageGone(Exception):  # noqa: N818 - not an error: the page was discarded while it was copied
    """The page was discarded, or copied by another thread, meanwhile; never leaves the store."""


class Demotion:
    """Moves pages down. Its methods run outside the lock, on the thread that needs room or on a worker."""

    def __init__(self, transfer: Transfer) -> None:
        self._transfer = transfer
        self._books = transfer.books
        self.room = Room(transfer.books, self.demote)

    def demote(self, entry: Entry, level: int, deadline: float) -> None:
        """Copies a victim, pinned at `level` by the caller, down and ends that place unless it is in use again.

        Raises:
            TierFullError, TierIOError: it could not go anywhere, and stays where it was.
        """
        books = self._books
        target: int | None = None
        pinned = entry.places[level]
        try:
            target = self._copy_down(entry, level, deadline)
        except PageGone:
            pass
        except BaseException:
            books.counts.demotion_errors += 1
            raise
        finally:
            with books.changed:
                place = self._unpin(entry, level, pinned)
                # The copy below may have been dropped again meanwhile, as a spare of this one.
                if (
                    target is not None
                    and place is not None
                    and not place.pins
                    and entry.has_other_copy(level)
                ):
                    books.vacate(entry, level, target)

    def clean(self, entry: Entry, level: int, deadline: float, *, to_last: bool = False) -> bool:
        """Copies a page, pinned at `level` by the caller, down and keeps both; False when that failed.

        Takes only room that costs no other page its copy. `to_last`: to the lowest tier, whatever lies between.
        """
        books = self._books
        pinned = entry.places[level]
        try:
            self._copy_down(entry, level, deadline, behind=True, to_last=to_last)
        except PageGone:
            pass
        except TierFullError:
            return False
        except Exception:
            books.counts.demotion_errors += 1
            return False
        finally:
            with books.changed:
                self._unpin(entry, level, pinned)
        return True

    def land(
        self, entry: Entry, origin: int, target: int, source: Source, deadline: float, *, behind: bool = False
    ) -> Place | None:
        """Writes a payload into a tier and publishes the place; a sum's place at `origin` ends with that.

        Returns:
            That place, whose room the caller gives back once it has let go of the source.

        `behind`: only into room that costs no other page its copy.

        Raises:
            TierFullError: neither eviction nor the operating system had the room.
        """
        books = self._books
        tier, meta, what = books.tiers[target], source.meta, f"write {entry.key}"
        place = self._room_for(target, meta.stored_bytes, what, deadline, behind=behind)
        with books.changed:
            if entry.dead or entry.places[target] is not None:  # discarded, or another thread copies it there
                books.release_room(target, place)
                raise PageGone
            entry.begin(target, place)
            place.meta = meta
        start_s = books.clock.now()
        try:
            view = tier.view(place.slot)
            if view is not None:
                source.fill(view[: meta.stored_bytes])
            else:
                assert source.data is not None, f"{entry.key}: a payload in no memory"
                tier.write(place.slot, source.data, meta)
        except BaseException as error:
            with books.changed:
                books.abort(entry, target)
                if isinstance(error, OSError) and error.errno in _NO_SPACE:
                    raise self.room.full(target, meta.stored_bytes, what) from error
            raise
        with books.changed:
            self._transfer.count(entry, origin, target, meta.stored_bytes, start_s)
            books.publish(entry, target)
            left: Place | None = None
            old = entry.places[origin]
            if entry.is_sum and old is not None and old.valid:
                assert old.pins == 1, f"{entry.key}: a sum moved while in use"
                self._unpin(entry, origin, old)
                if entry.places[origin] is old:
                    left = books.detach(entry, origin, target)
            books.settle(entry)
        return left

    def order_below(self, entry: Entry, level: int) -> list[int]:
        """The tiers below a level to try in turn: first those that admit the page, from the highest down."""
        books, place = self._books, entry.places[level]
        num_bytes = entry.num_bytes if place is None or place.meta is None else place.meta.stored_bytes
        with books.changed:
            refused = [t for t in range(level + 1, books.last + 1) if not books.admits(entry, t, num_bytes)]
        return [t for t in range(level + 1, books.last + 1) if t not in refused] + refused

    def _room_for(self, target: int, num_bytes: int, what: str, deadline: float, *, behind: bool) -> Place:
        if not behind:
            return self.room.acquire(target, num_bytes, what, deadline)
        self.room.let_give_way(target, num_bytes, deadline)
        with self._books.changed:
            place = self.room.acquire_behind(target, num_bytes)
            if place is None:
                raise self.room.full(target, num_bytes, what)
            return place

    def _unpin(self, entry: Entry, level: int, pinned: Place | None) -> Place | None:
        """Ends the copy's pin, unless the place has gone with a sum that moved; returns the place if it is left."""
        if pinned is None or entry.places[level] is not pinned:
            return None
        self._books.unpin(entry, pinned, level, copy=True)
        return pinned if entry.places[level] is pinned else None

    def _copy_down(
        self, entry: Entry, level: int, deadline: float, *, behind: bool = False, to_last: bool = False
    ) -> int:
        """Copies from a pinned place to the next tier below that can take it; returns that tier's level."""
        error: TierFullError | None = None
        for target in self._targets(entry, level, behind=behind, to_last=to_last):
            try:
                with self._transfer.source(entry, level, target, deadline) as source:
                    left = self.land(entry, level, target, source, deadline, behind=behind)
                del source
                if left is not None:
                    with self._books.changed:
                        self._books.release_room(level, left)
            except TierFullError as full:
                error = full.with_traceback(None)  # whose frames would keep the page's memory
                continue
            return target
        assert error is not None, "no tier to try"
        raise error

    def _targets(self, entry: Entry, level: int, *, behind: bool, to_last: bool) -> list[int]:
        """Tiers to try in turn. With a plan, write-behind fills those above a drive and leaves that to the plan."""
        books = self._books
        assert level < books.last, "demotion from the lowest tier"
        if to_last:
            return [books.last]
        below = self.order_below(entry, level)
        planned = behind and level + 1 < books.last and books.distance(entry.key) is not None
        if planned and not is_addressable(books.tiers[books.last]):
            below.remove(books.last)
        return below
