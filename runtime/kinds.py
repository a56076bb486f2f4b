"""What the kinds of a model's pages say of them."""

from __future__ import annotations

from tiercache.runtime.selection import INDEX_KEY, SELECTION
from tiercache.runtime.states import is_state

_ATTENDED_TO = ("key", "value", "latent", "rotary_key")
_OF_TOKENS = (*_ATTENDED_TO, INDEX_KEY, SELECTION)


def of_graph(kind: str) -> bool:
    """Whether pages of this kind belong to one graph, not to their content."""
    by_content = kind in _OF_TOKENS or is_state(kind)
    return kind.startswith("grad_") or not by_content


def is_content(kind: str) -> bool:
    """Whether pages of this kind are a node's own, of so many bytes a token."""
    return kind in _OF_TOKENS


def is_attended_to(kind: str) -> bool:
    """Whether pages of this kind hold what attention products run over."""
    return kind in _ATTENDED_TO
