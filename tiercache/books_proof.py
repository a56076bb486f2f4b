"""The proof that the store's books and its tiers agree."""

from __future__ import annotations

from tiercache.placement import Books


def prove(books: Books) -> None:
    """Raises AssertionError when entries, places and budgets do not agree; the lock is held."""
    assert all(entry.key is key or entry.key == key for key, entry in books.table.items())
    live = [entry for entry in books.by_id if entry is not None]
    for level, tier in enumerate(books.tiers):
        assert books.held[level] <= tier.used_bytes <= tier.capacity_bytes, tier.name
        places = [entry.places[level] for entry in live if entry.places[level] is not None]
        booked = sum(place.slot.num_bytes for place in places if place is not None)
        booked += books.lent_bytes if level == 0 else 0
        assert booked <= books.held[level], tier.name
        if books.transient[level] == 0:
            assert booked == books.held[level], f"{tier.name}: {booked} booked, {books.held[level]} held"
        if books.held[level] == 0:
            unclaimed = tier.used_bytes - tier.spare_bytes
            assert unclaimed == 0, f"{tier.name}: {unclaimed} bytes belong to nobody"
        tier.check_integrity()
    for entry in live:
        assert not entry.dead or books.table.get(entry.key) is not entry
        assert entry.dead or entry.refs > 0
        valid = [place for place in entry.places if place is not None and place.valid]
        assert not entry.is_sum or len(valid) <= 1, f"{entry.key}: a sum in two places"
        assert entry.dead or not entry.visible or entry.busy or valid, f"{entry.key}: no bytes"
        device = entry.places[0]
        assert entry.leases <= (device.pins if device is not None else 0)
