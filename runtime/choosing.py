"""What each captured node leaves in the store for its pop: the choice behind `prefix_activations="auto"`.

Keeping more of a node's graph saves recomputation and costs room. Recomputation is priced by the model's own
floating-point operations at measured speeds; what does not fit the device goes one tier down, at that tier's speed.
Room goes to whatever saves the most seconds a byte.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from tiercache.measure.machine import this_machine
from tiercache.measure.quick import measure_quickly
from tiercache.profile import Profile, load_profile
from tiercache.runtime.access import node_bytes
from tiercache.runtime.kernels import accumulator_dtype
from tiercache.runtime.kinds import of_graph
from tiercache.runtime.limits import visit_room
from tiercache.runtime.options import KEPT_ACTIVATIONS, KeptActivations, ReplayOptions
from tiercache.runtime.probe import Shape
from tiercache.runtime.speed import attention_kernels
from tiercache.runtime.step import Keeping
from tiercache.runtime.tier_room import Room, price_of_room, rooms_of
from tiercache.runtime.tree import Tree

_CALL_S = 40e-6  # of the store, for a page put and taken back
_BACKWARD = 2.0  # forwards that a backward takes: what copies can hide behind, beside the forward
_MARGIN = 0.02  # of a node's forward: gains below that are noise


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds and bytes of one model's nodes on one machine.

    Args:
        shape: probed with every choice.
        profile: of the machine.
    """

    shape: Shape
    profile: Profile

    def forward_s(self, num_tokens: int, start: int) -> tuple[float, float]:
        """Of a node that begins at `start`: all of it, and its attention's part."""
        dtype = self.shape.layers[0].dtype if self.shape.layers else "float32"
        speed = self.profile.computing(dtype)
        attention = 0.0
        for event in self.shape.of("capture", "attention"):
            if event.kind == "attention_output":
                layer = self.shape.layers[event.layer]
                width = event.bytes_of(1) // layer.dtype.itemsize
                keys = start + num_tokens / 2
                keys = keys if layer.window is None else min(keys, layer.window)
                attention += 4.0 * num_tokens * keys * width
        attention_s = speed.attention_s(attention, 0.25 * num_tokens)
        elementwise = 2.0 * self.shape.activation_bytes_per_token / self.profile.memory_bytes_per_s
        product = self.shape.flops_per_token / speed.matmul_flops_per_s
        return num_tokens * (product + elementwise) + attention_s, attention_s

    def kept(self, kept: KeptActivations, num_tokens: int) -> tuple[int, int]:
        """Bytes and pages that a node leaves beside its keys and values."""
        events = [e for e in self.shape.of("capture", kept) if e.operation == "put" and of_graph(e.kind)]
        if kept == "recompute":
            return 0, 0
        return sum(e.bytes_of(num_tokens) for e in events), len(events)

    def pages(self, num_tokens: int) -> int:
        """Bytes of a node's pages and of the sums that descendants send back into them."""
        total = node_bytes(self.shape, num_tokens)
        for layer in self.shape.layers:
            size = accumulator_dtype(layer.dtype).itemsize
            total += num_tokens * size * sum(heads * width for heads, width in layer.stored_pages)
        return total

    def seconds(self, kept: KeptActivations, num_tokens: int, start: int) -> float:
        """What pop computes a second time, and what keeping the rest on the device costs.

        What is kept stays beside all that comes after it, so it takes memory that the process did not have; what is
        computed again whole takes as much when it is.
        """
        forward_s, attention_s = self.forward_s(num_tokens, start)
        num_bytes, num_pages = self.kept(kept, num_tokens)
        again_s = {"all": 0.0, "attention": forward_s - attention_s}.get(kept, forward_s)
        # what is handed over whole is not copied
        copy_s = 0.0 if kept == "all" else 2.0 * num_bytes / self.profile.memory_bytes_per_s
        whole = num_tokens * self.shape.activation_bytes_per_token
        fresh_s = (whole if kept == "recompute" else num_bytes) * self.profile.fresh_s_per_byte
        return again_s + copy_s + fresh_s + num_pages * _CALL_S


Live = Literal["path", "tree", "nothing"]


class Chooser:
    """Chooses for one replay; measures the machine when the first choice needs it.

    Args:
        options: of the replay.
        store: a `TierStore`, whose budgets count.
        device: of the model.
    """

    def __init__(self, options: ReplayOptions, store: Any, device: torch.device) -> None:
        self._options, self._store, self._device = options, store, device
        self._profile: Profile | None = None
        if isinstance(options.profile, Profile):
            self._profile = options.profile
        elif options.profile is not None:
            self._profile = load_profile(Path(options.profile))
        if self._profile is not None:
            self._profile.warn_unless_of(this_machine())

    def choose(
        self, tree: Tree, shape: Shape, dtype: torch.dtype, live: Live, autocast: torch.dtype | None
    ) -> dict[int, Keeping]:
        """A choice for each inner node.

        Args:
            tree: of the step.
            shape: of the model.
            dtype: of its weights.
            live: pages that are there at once: of a "path", of the whole "tree", or "nothing" that a pop needs.
            autocast: dtype of the step's autocast, under which a graph keeps a cast of every weight.
        """
        told = self._options.prefix_activations
        inner = [node.index for node in tree.nodes if not node.is_leaf]
        if live == "nothing":
            return dict.fromkeys(inner, Keeping("recompute", reason="nothing is popped", popped=False))
        if told != "auto":
            return dict.fromkeys(inner, Keeping(told))
        if self._profile is None:
            self._profile = measure_quickly(self._device, dtype, attention_kernels())
        stats = self._store.stats()
        free = {name: size - stats.bytes_used[name] for name, size in stats.bytes_capacity.items()}
        allowed = [kept for kept in KEPT_ACTIVATIONS if kept != "all" or autocast is None]
        return choose_kept(
            tree,
            Costs(shape, self._profile),
            rooms_of(free, self._profile),
            whole_tree=live == "tree",
            max_live_bytes=visit_room(self._options, self._store.config.device_bytes),
            allowed=allowed,
        )


class _Loads:
    """Bytes that lie in the store at once: along each path, or of the whole tree."""

    def __init__(self, tree: Tree, own: Sequence[int], *, whole_tree: bool) -> None:
        self._tree, self._own, self._whole = tree, list(own), whole_tree
        self._below = [0] * len(own)
        self._total = sum(own)
        for node in reversed(tree.nodes):
            self._below[node.index] = max((self._own[c] + self._below[c] for c in node.children), default=0)

    def through(self, index: int) -> int:
        """Most bytes at once while the node's are among them."""
        if self._whole:
            return self._total
        total, at = self._below[index], index
        while at >= 0:
            total, at = total + self._own[at], self._tree.nodes[at].parent
        return total

    def add(self, index: int, num_bytes: int) -> None:
        """The node leaves so many bytes more."""
        self._own[index] += num_bytes
        self._total += num_bytes
        at = self._tree.nodes[index].parent
        while at >= 0:
            children = self._tree.nodes[at].children
            self._below[at] = max(self._own[c] + self._below[c] for c in children)
            at = self._tree.nodes[at].parent


def choose_kept(
    tree: Tree,
    costs: Costs,
    rooms: Sequence[Room],
    *,
    whole_tree: bool,
    max_live_bytes: int,
    allowed: Sequence[KeptActivations] = KEPT_ACTIVATIONS,
) -> dict[int, Keeping]:
    """A choice for each inner node.

    Args:
        tree: of the step.
        costs: of the model.
        rooms: tiers, from the device down.
        whole_tree: every node's pages live until the last pop, not one path's.
        max_live_bytes: activations that pop may hold at once; a node beyond them is not recomputed whole.
        allowed: what to choose among; "layer_inputs" is always.
    """
    inner = [node for node in tree.nodes if not node.is_leaf]
    own = [0 if node.is_leaf else costs.pages(len(node.tokens)) for node in tree.nodes]
    base: dict[int, KeptActivations] = {}
    for node in inner:
        whole = len(node.tokens) * costs.shape.activation_bytes_per_token
        base[node.index] = (
            "recompute" if whole <= max_live_bytes and "recompute" in allowed else "layer_inputs"
        )
        own[node.index] += costs.kept(base[node.index], len(node.tokens))[0]
    loads = _Loads(tree, own, whole_tree=whole_tree)
    chosen = {
        index: Keeping(kept, 0, 0.0, "nothing that costs room saves time") for index, kept in base.items()
    }
    offers = []
    for node in inner:
        size, start = len(node.tokens), node.start
        least_s = costs.seconds(base[node.index], size, start)
        least = costs.kept(base[node.index], size)[0]
        for kept in allowed:
            more = costs.kept(kept, size)[0] - least
            gain_s = least_s - costs.seconds(kept, size, start)
            if kept != base[node.index] and gain_s > _MARGIN * costs.forward_s(size, start)[0]:
                offers.append((gain_s / max(1, more), node.index, kept, more, gain_s))
    for _, index, kept, more, gain_s in sorted(offers, key=lambda offer: offer[0], reverse=True):
        _consider(chosen, index, kept, more, gain_s, costs, tree, loads, rooms)
    return chosen


def _consider(
    chosen: dict[int, Keeping],
    index: int,
    kept: KeptActivations,
    more: int,
    gain_s: float,
    costs: Costs,
    tree: Tree,
    loads: _Loads,
    rooms: Sequence[Room],
) -> None:
    """Takes an offer if what it saves beyond the node's present choice pays for the room that it takes."""
    node, present = tree.nodes[index], chosen[index]
    extra, gained_s = more - present.num_bytes, gain_s - present.saved_s
    if gained_s <= 0:
        return
    hidden_s = (1.0 + _BACKWARD) * costs.forward_s(len(node.tokens), node.start)[0]
    before = loads.through(index)
    price = price_of_room(before, before + extra, rooms, hidden_s)
    if price is None:
        if present.num_bytes == 0:
            chosen[index] = Keeping(present.kept, 0, 0.0, f"{kept} needs {extra} bytes that no tier has")
        return
    price_s, where = price
    if price_s >= gained_s:
        if present.num_bytes == 0:
            why = f"{kept} would save {gained_s:.3g} s and cost {price_s:.3g} s on the way to {where}"
            chosen[index] = Keeping(present.kept, 0, 0.0, why)
        return
    loads.add(index, extra)
    reason = f"saves {gain_s:.3g} s of the second forward for {more} bytes, down to {where}"
    again_s = None
    if kept == "attention":
        again_s = costs.forward_s(len(node.tokens), node.start)[1] / max(1, len(costs.shape.layers))
    chosen[index] = Keeping(kept, more, gain_s - price_s, reason, again_s)
