"""The store's books: which page has which places, and what that leaves of every budget."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tiercache.clock import Clock
from tiercache.entry import Entry, PageKey, Place, Rise
from tiercache.errors import PageMissingError, TierFullError
from tiercache.monitor import Monitor
from tiercache.pace import Pace
from tiercache.stats import Stats
from tiercache.streams import Engines
from tiercache.tiers.base import PageMeta, Slot, Tier
from tiercache.trace import Timeline


def _unplanned(_key: PageKey) -> float | None:
    """No plan is followed."""
    return None


def _kept(_: PageKey) -> None:
    """Every page must be kept, as far as no plan says otherwise."""


class Books(Monitor):
    """Entries, places, pins and budgets of all tiers.

    Implementation notes. One lock guards everything here, and nothing blocks while it is held: copies, waits
    for room and codecs run outside. A place in a tier that has another below it is known to that tier's policy
    from `publish` to `vacate`; while it is pinned the policy has it under lease and never offers it. Places
    that are being filled or copied from are counted as transient: whoever needs room waits for those, since
    they end by themselves, and not for leases of its own thread, which don't.

    Attributes:
        table: visible pages and pages whose first put is in progress.
        lent_bytes: room of the device tier that callers keep memory of their own in.
        on_publish: called with the level after a place became valid.
        on_bury: called with an entry that is about to leave the table.
        recompute_s: seconds to compute a page again, as a plan says; None for one that must be kept.
        distance: accesses until a page's next use in the plan: `Follower.distance`.
        pace: of the run and of copies.
        timeline: where copies and stalls are noted, if they are.
    """

    def __init__(
        self,
        tiers: Sequence[Tier],
        policies: Sequence[Any],
        engines: Engines,
        clock: Clock,
        next_use: Callable[[PageKey], int | None],
    ) -> None:
        super().__init__(clock)
        self.tiers = list(tiers)
        self.last = len(tiers) - 1
        self.policies = list(policies)
        self.engines = engines
        self.next_use = next_use
        self.table: dict[PageKey, Entry] = {}
        self.graphs: dict[int, set[PageKey]] = {}
        self.by_id: list[Entry | None] = []
        self.held = [0] * len(tiers)
        self.lent_bytes = 0
        self.transient = [0] * len(tiers)
        self.on_publish: Callable[[int], None] | None = None
        self.on_bury: Callable[[Entry], None] | None = None
        self.recompute_s: Callable[[PageKey], float | None] = _kept
        self.distance: Callable[[PageKey], float | None] = _unplanned
        self.pace = Pace()
        self.timeline: Timeline | None = None
        self.counts = Stats(bytes_peak={tier.name: 0 for tier in tiers})
        self._free_ids: list[int] = []

    # Entries

    def enter(self, entry: Entry) -> None:
        """Gives an entry its id and its row in the table; it is visible once the caller says so."""
        if self._free_ids:
            entry.id = self._free_ids.pop()
            self.by_id[entry.id] = entry
        else:
            entry.id = len(self.by_id)
            self.by_id.append(entry)
        self.table[entry.key] = entry
        if entry.key.graph:
            self.graphs.setdefault(entry.key.graph, set()).add(entry.key)

    def bury(self, entry: Entry) -> None:
        """Takes an entry out of the table; its places end now or as soon as nobody uses them."""
        if entry.dead:
            return
        if self.on_bury is not None:
            self.on_bury(entry)
        entry.dead = True
        if self.table.get(entry.key) is entry:
            del self.table[entry.key]
            of_graph = self.graphs.get(entry.key.graph)
            if of_graph is not None:
                of_graph.discard(entry.key)
                if not of_graph:
                    del self.graphs[entry.key.graph]
        rise = entry.rise
        if rise is not None and not rise.started:
            self.abandon(entry, rise, PageMissingError(f"read {entry.key}: the page was discarded"))
        self.settle(entry)

    def abandon(self, entry: Entry, rise: Rise, error: BaseException) -> None:
        """Ends a rise that got no room, or that nobody will carry out."""
        if rise.place is not None:
            self.release_room(rise.level, rise.place)
        rise.error, rise.done = error, True
        entry.rise = None
        self.settle(entry)

    def adopt(self, entry: Entry, slot: Slot, meta: PageMeta) -> None:
        """Enters a page whose bytes lie in the lowest tier already; nobody holds a reference of it yet."""
        self.enter(entry)
        place = Place(slot)
        place.meta, place.valid = meta, True
        entry.places[self.last] = place
        entry.refs, entry.visible, entry.persistent = 0, True, True
        self.held[self.last] += slot.num_bytes

    def settle(self, entry: Entry) -> None:
        """After a change of an entry: wakes those who wait for it, and ends what a dead one no longer needs."""
        if not entry.dead:
            self.notify()
            return
        if self.closed and not self.by_id:  # all were forgotten while this one's thread was waking up
            return
        for level, place in enumerate(entry.places):
            if place is not None and place.valid and place.pins == 0:
                self.vacate(entry, level)
        if entry.id >= 0 and not entry.busy and entry.rise is None and not any(entry.places):
            for policy in self.policies:
                if policy is not None:
                    policy.remove(entry.id)
            self.by_id[entry.id] = None
            self._free_ids.append(entry.id)
            entry.id = -1
        self.notify()

    # Places

    def free_bytes(self, level: int) -> int:
        """Budget that nothing uses, or that gives way at once."""
        tier = self.tiers[level]
        return tier.capacity_bytes - tier.used_bytes + tier.spare_bytes

    def reserve(self, level: int, num_bytes: int) -> Place | None:
        """Room at once, or None; a zero-size page takes one byte."""
        tier = self.tiers[level]
        try:
            slot = tier.reserve(num_bytes or 1)
        except TierFullError:
            return None
        self.held[level] += slot.num_bytes
        self.transient[level] += 1
        peaks, used = self.counts.bytes_peak, tier.used_bytes
        if used > peaks[tier.name]:
            peaks[tier.name] = used
        return Place(slot)

    def release_room(self, level: int, place: Place) -> None:
        """Gives back room that was reserved for no entry yet."""
        self.transient[level] -= 1
        self._free(level, place)

    def publish(self, entry: Entry, level: int) -> Place:
        """The place's bytes are complete: the policy may choose it from now on."""
        place = entry.publish(level)
        self.transient[level] -= 1
        if self._known(entry, level):
            policy = self.policies[level]
            policy.insert(entry.id, place.slot.num_bytes, self._cost(entry, level))
            when = self.next_use(entry.key)
            if when is not None:
                policy.set_next_use(entry.id, when)
        if self.on_publish is not None:
            self.on_publish(level)
        self.notify()
        return place

    def abort(self, entry: Entry, level: int) -> None:
        """Filling failed: the place was never there."""
        place = entry.vacate(level)
        self.transient[level] -= 1
        self._free(level, place)

    def vacate(self, entry: Entry, level: int, to_level: int | None = None) -> None:
        """Ends a valid place that nobody uses; `to_level` says that it was evicted, and where to."""
        assert to_level is None or entry.dead or entry.has_other_copy(level), f"{entry.key}: the only copy"
        self._free(level, self._take_out(entry, level, to_level))

    def detach(self, entry: Entry, level: int, to_level: int) -> Place:
        """Ends an evicted place whose memory is still looked at: its room comes free by `release_room`."""
        self.transient[level] += 1
        return self._take_out(entry, level, to_level)

    def _take_out(self, entry: Entry, level: int, to_level: int | None) -> Place:
        place = entry.vacate(level)
        if self._known(entry, level):
            if to_level is None:
                self.policies[level].remove(entry.id)
            else:
                self.policies[level].evict(entry.id, to_level)
        if to_level is not None:
            self.counts.evictions += 1
        return place

    def pin(self, entry: Entry, place: Place, level: int, *, copy: bool = False) -> None:
        """Keeps a valid place where it is, for a lease or, transiently, for a copy."""
        place.pins += 1
        if copy:
            self.transient[level] += 1
        if place.pins == 1 and self._known(entry, level):
            self.policies[level].lease(entry.id)

    def use(self, entry: Entry, level: int) -> None:
        """Tells the tier's policy that the page's place there was used."""
        if self._known(entry, level):
            self.policies[level].hit(entry.id)

    def unpin(self, entry: Entry, place: Place, level: int, *, copy: bool = False) -> None:
        """Ends one pin."""
        place.pins -= 1
        if copy:
            self.transient[level] -= 1
        if place.pins == 0:
            if self._known(entry, level):
                self.policies[level].release(entry.id)
            if entry.dead:
                self.settle(entry)
        self.notify()

    def _free(self, level: int, place: Place) -> None:
        if place.tensor is not None:
            self.engines.of(place.tensor.device).free(place.tensor)
            place.tensor = None
        self.held[level] -= place.slot.num_bytes
        tier = self.tiers[level]
        if tier.keeps_records and place.valid and place.meta is not None and place.meta.persistent:
            tier.let_go(place.slot)
        else:
            tier.free(place.slot)
        self.notify()

    def _known(self, entry: Entry, level: int) -> bool:
        return entry.num_bytes > 0 and self.policies[level] is not None

    def _cost(self, entry: Entry, level: int) -> float:
        """Relative seconds to have the page again: its bytes, four times dearer when they come from disk.

        A page that can be computed again costs no more than that.
        """
        from_disk = level == self.last - 1 and self.last == 2
        reload = entry.num_bytes * (4.0 if from_disk else 1.0)
        again_s = self.recompute_s(entry.key)
        return (
            reload
            if again_s is None
            else reload * min(1.0, again_s / self.pace.reload_s(level, entry.num_bytes))
        )

    def is_cheaper_again(self, entry: Entry, level: int) -> bool:
        """Whether computing the page again takes less than sending it down from here and bringing it back."""
        again_s = self.recompute_s(entry.key)
        return again_s is not None and again_s < self.pace.reload_s(level, entry.num_bytes)

    def admits(self, entry: Entry, level: int, num_bytes: int) -> bool:
        """Whether the tier's admission lets a page of so many stored bytes in; the lowest one takes all."""
        policy = self.policies[level]
        return policy is None or not entry.num_bytes or bool(policy.admits(entry.id, num_bytes))

    def is_selective(self, level: int) -> bool:
        """Whether the tier's admission may refuse pages."""
        return self.policies[level] is not None and bool(self.policies[level].selective)

    def forget_all(self) -> None:
        """Ends every place that nobody copies from or to; after close, when leases no longer count."""
        for entry in self.by_id:
            if entry is None:
                continue
            for level, place in enumerate(entry.places):
                if place is None or not place.valid:
                    continue
                if place.pins:
                    place.tensor = None  # whoever holds the lease has the tensor
                entry.places[level] = None
                self._free(level, place)
        self.table.clear()
        self.graphs.clear()
        self.by_id.clear()
        self.lease_owners.clear()
