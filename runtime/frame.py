"""A frame: what the attention function needs to know of the visit that is running.

packed axis of a visit    | tail 1 | tail 2 | tail 3 |        pieces: one a node, own causal block
page of the parent        |<------ all queries ----->|        one product for every tail of the batch
page of the grandparent   |<------ all queries ----->|
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from tiercache.entry import PageKey
from tiercache.errors import ConfigError
from tiercache.runtime.kernels import MASKED


class PageStore(Protocol):
    """What a visit asks of a store; `TierStore` is one, the probe's recorder another."""

    def put(self, key: PageKey, tensor: torch.Tensor, *, own: bool = False) -> bool:
        """Stores an immutable page."""

    def read(self, key: PageKey) -> Any:
        """A lease, usable in a with statement, with `.tensor`."""

    def accumulate(self, key: PageKey, tensor: torch.Tensor) -> None:
        """Adds into a sum."""

    def take(self, key: PageKey) -> torch.Tensor | None:
        """Removes and returns a page."""

    def release(self, key: PageKey) -> None:
        """Gives a page back that this step will not read again."""


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One attention layer, as its first call showed it.

    Attributes:
        index: order of the layer's call in a forward.
        name: of the module.
        window: keys more than this many positions back are not seen, or None.
        key_page: shape of the key page of n tokens without n: (Hkv, Dk).
        value_page: (Hkv, Dv).
        dtype: of the pages.
        latent_pages: shapes of a token in the pages of latents and of rotary keys, where those are what is stored.
    """

    index: int
    name: str
    window: int | None
    key_page: tuple[int, int]
    value_page: tuple[int, int]
    dtype: torch.dtype
    latent_pages: tuple[tuple[int, int], tuple[int, int]] | None = None

    @property
    def kinds(self) -> tuple[str, str]:
        """Of the two pages that a node leaves."""
        return ("key", "value") if self.latent_pages is None else ("latent", "rotary_key")

    @property
    def stored_pages(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """Shapes of a token in them."""
        return self.latent_pages or (self.key_page, self.value_page)


@dataclass(frozen=True, slots=True)
class Piece:
    """One node of a visit: tokens [begin, end) of the packed axis, at positions from `position` on."""

    node: int
    digest: bytes
    begin: int
    end: int
    position: int


@dataclass(frozen=True, slots=True)
class Ancestor:
    """A captured node whose pages the visit reads. `trainable`: gradients flow back into its pages."""

    digest: bytes
    position: int
    length: int
    trainable: bool


@dataclass(frozen=True, slots=True)
class PageCall:
    """Queries [q_begin, q_end) of the packed axis against keys [k_begin, k_end) of an ancestor's page."""

    ancestor: Ancestor
    q_begin: int
    q_end: int
    k_begin: int
    k_end: int
    bias: torch.Tensor | None


@dataclass(slots=True)
class Frame:
    """State of one visit. All pieces start at the same position and have the same ancestors.

    Attributes:
        store: where pages are read and written.
        graph: id that keys gradient pages and layer inputs.
        pieces: nodes of the visit along the packed axis.
        ancestors: root first.
        device: of the queries.
        phase: "capture" writes pages, "pop" takes gradient pages and adds them to dK and dV, "replay" and
            "score" do neither.
        keep_attention: capture leaves attention outputs and log-sum-exps in the store, and pop takes them back.
        debug: compare recomputed pages with the captured ones, bit for bit.
        keep_graph: capture leaves its whole graph in the store.
        records_selection: capture leaves what its queries selected for the pop.
        balance: the experts' load-balancing loss, where it is wanted.
        spent: digests of ancestors that nobody attends to after this visit; its backward gives their pages back.
    """

    store: PageStore
    graph: int
    pieces: list[Piece]
    ancestors: list[Ancestor]
    device: torch.device
    phase: str
    keep_attention: bool = False
    debug: bool = False
    keep_graph: bool = False
    records_selection: bool = False
    balance: Any = None
    spent: frozenset[bytes] = frozenset()
    _kept: set[int] = field(default_factory=set)
    _calls: dict[int | None, list[PageCall]] = field(default_factory=dict)
    _own_bias: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)

    @property
    def num_tokens(self) -> int:
        """Length of the packed axis."""
        return self.pieces[-1].end

    def calls(self, window: int | None) -> list[PageCall]:
        """Page products of a layer with this window, root first."""
        if window not in self._calls:
            self._calls[window] = [
                call
                for ancestor in self.ancestors
                for call in page_calls(self.pieces, ancestor, window, self.device)
            ]
        return self._calls[window]

    def keep_once(self, layer: LayerSpec) -> None:
        """Raises ConfigError where a layer leaves its attention a second time: it has one place for it."""
        if layer.index in self._kept:
            raise ConfigError(
                f'prefix_activations="attention": {layer.name} attends more than once in a forward',
                remedy='keep "layer_inputs" or "all", or give each call a layer of its own',
            )
        self._kept.add(layer.index)

    def own_bias(self, length: int, window: int | None) -> torch.Tensor | None:
        """[n, n] mask of a node's own block where the window is shorter than the node, else None (causal)."""
        if window is None or length <= window:
            return None
        key = (length, window)
        if key not in self._own_bias:
            at = torch.arange(length, device=self.device)
            self._own_bias[key] = _bias(at[:, None] - at[None, :], window)
        return self._own_bias[key]


def _bias(distance: torch.Tensor, window: int) -> torch.Tensor:
    hidden = (distance < 0) | (distance >= window)
    return torch.zeros(distance.shape, device=distance.device).masked_fill_(hidden, MASKED)


def page_calls(
    pieces: list[Piece], ancestor: Ancestor, window: int | None, device: torch.device | None
) -> list[PageCall]:
    """The products that a page takes part in. `device=None` leaves the masks out (for planning)."""
    if window is None:
        return [PageCall(ancestor, pieces[0].begin, pieces[-1].end, 0, ancestor.length, None)]
    calls = []
    last_key = ancestor.position + ancestor.length - 1
    for piece in pieces:
        # query at position p sees key at position k where p - k < window
        num_queries = min(piece.end - piece.begin, window + last_key - piece.position)
        first_key = max(ancestor.position, piece.position - window + 1)
        if num_queries <= 0 or first_key > last_key:
            continue
        last_query = piece.position + num_queries - 1
        bias = None
        if last_query - first_key >= window and device is not None:
            queries = torch.arange(piece.position, last_query + 1, device=device)
            keys = torch.arange(first_key, last_key + 1, device=device)
            bias = _bias(queries[:, None] - keys[None, :], window)
        begin = first_key - ancestor.position
        calls.append(PageCall(ancestor, piece.begin, piece.begin + num_queries, begin, ancestor.length, bias))
    return calls


def spent_ancestors(frame: Frame, window: int | None) -> list[Ancestor]:
    """Ancestors that a layer with this window attends to in a visit, and nobody after its backward."""
    return [
        ancestor
        for ancestor in frame.ancestors
        if ancestor.digest in frame.spent and page_calls(frame.pieces, ancestor, window, None)
    ]
