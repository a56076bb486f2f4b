"""A page's key, its places in the tiers, and the state changes that are legal for them."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from tiercache.tiers.base import PageMeta, Slot


@dataclass(frozen=True)
class PageKey:
    """Names one page of the store by what it holds.

    Attributes:
        node: 32-byte digest of the node's tokens, chained to its parent's digest and to the namespace
            (weights and their version, rotary configuration, dtype, adapter).
        layer: index of the layer that the page belongs to.
        kind: what the page holds: "key", "value", "state", "layer_input", or "grad_" before one of them.
        graph: 0 for pages keyed by content alone; the graph's id for gradient pages and layer inputs.
    """

    node: bytes
    layer: int
    kind: str
    graph: int = 0

    @cached_property
    def digest(self) -> bytes:
        """32-byte BLAKE2b digest of all fields."""
        head = f"{self.layer}:{self.kind}:{self.graph}:".encode()
        return hashlib.blake2b(head + self.node, digest_size=32).digest()

    def __str__(self) -> str:
        graph = f"@{self.graph}" if self.graph else ""
        return f"{self.node.hex()[:12]}/layer{self.layer}/{self.kind}{graph}"


class Place:
    """One copy of a page in one tier: reserved room, then the page's bytes in it.

    Attributes:
        slot: room in the tier.
        meta: what the record says of its payload; None on the device.
        tensor: the page itself, on the device only.
        ready: event after which the tensor may be read, where copies run late.
        valid: the bytes are complete. Before that the place is being filled and belongs to who fills it.
        pins: leases and copies that read the place; a pinned place is neither freed nor overwritten.
        ahead: brought up before anybody asked, and not read yet.
    """

    __slots__ = ("ahead", "meta", "pins", "ready", "slot", "tensor", "valid")

    def __init__(self, slot: Slot) -> None:
        self.slot = slot
        self.meta: PageMeta | None = None
        self.tensor: torch.Tensor | None = None
        self.ready: Any = None
        self.valid = False
        self.pins = 0
        self.ahead = False


class Rise:
    """A promotion in progress; readers wait for `done` and raise `error`.

    Attributes:
        level: the tier that the page comes up to.
        place: the room reserved there, as long as it is not part of the entry.
        started: some thread carries it out; before that, whoever needs it first may do so.
    """

    __slots__ = ("done", "error", "level", "place", "started")

    def __init__(self, level: int) -> None:
        self.level = level
        self.place: Place | None = None
        self.started = False
        self.done = False
        self.error: BaseException | None = None


class Entry:
    """One page: what it is, who refers to it, and its places, from the device (0) down.

    A place goes  absent -> filling -> valid -> absent  or  filling -> absent (the copy failed). Immutable
    pages may be valid in several tiers at once; a sum is valid in one, for it changes. Nothing here is
    thread-safe: the store's lock is held by whoever calls.

    Attributes:
        id: dense number, the eviction policies' name of the page; reused after the page is gone.
        refs: references by content; the page goes when the last is dropped.
        leases: leases in force.
        visible: the first put is complete.
        busy: a thread changes or removes the page; others wait.
        dead: discarded; its places end as soon as nobody uses them.
        rise: the promotion in progress.
        coding: how it is coded below the device; None for raw bytes everywhere, as sums are.
        persistent: its record on disk is for later processes too.
        refused: the device's admission lets the page in only as long as it is leased.
    """

    __slots__ = (
        "busy", "coding", "dead", "device", "dtype", "id", "is_sum", "key", "leases", "num_bytes",
        "persistent", "places", "refs", "refused", "rise", "shape", "visible",
    )  # fmt: skip

    def __init__(
        self,
        key: PageKey,
        dtype: torch.dtype,
        shape: tuple[int, ...],
        device: torch.device,
        num_levels: int,
        *,
        is_sum: bool = False,
    ) -> None:
        self.key = key
        self.id = -1
        self.dtype = dtype
        self.shape = shape
        self.device = device
        count = dtype.itemsize
        for size in shape:
            count *= size
        self.num_bytes = count
        self.is_sum = is_sum
        self.places: list[Place | None] = [None] * num_levels
        self.refs = 1
        self.leases = 0
        self.visible = False
        self.busy = False
        self.dead = False
        self.rise: Rise | None = None
        self.coding: Any = None
        self.persistent = False
        self.refused = False

    def begin(self, level: int, place: Place) -> None:
        """From absent to filling."""
        assert self.places[level] is None, f"{self.key}: level {level} is taken"
        assert not place.valid
        self.places[level] = place

    def publish(self, level: int) -> Place:
        """From filling to valid."""
        place = self.places[level]
        assert place is not None, f"{self.key}: publish of no place at level {level}"
        assert not place.valid, f"{self.key}: level {level} is valid already"
        place.valid = True
        return place

    def vacate(self, level: int) -> Place:
        """From valid or filling to absent; nobody may use the place."""
        place = self.places[level]
        assert place is not None, f"{self.key}: vacate of no place at level {level}"
        assert place.pins == 0, f"{self.key}: level {level} is in use"
        self.places[level] = None
        return place

    def valid_place(self, level: int) -> Place | None:
        """The place at that level when its bytes are complete."""
        place = self.places[level]
        return place if place is not None and place.valid else None

    def source(self) -> int | None:
        """The highest level with complete bytes."""
        for level, place in enumerate(self.places):
            if place is not None and place.valid:
                return level
        return None

    def has_copy_below(self, level: int) -> bool:
        """Whether complete bytes lie further down."""
        return any(place is not None and place.valid for place in self.places[level + 1 :])

    def has_other_copy(self, level: int) -> bool:
        """Whether complete bytes lie in another tier."""
        return any(
            place is not None and place.valid for other, place in enumerate(self.places) if other != level
        )
