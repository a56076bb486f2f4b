"""A page's key. Its places and legal state changes live here too."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property


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
        """32-byte BLAKE2b digest of all fields: the key of the record on disk."""
        head = f"{self.layer}:{self.kind}:{self.graph}:".encode()
        return hashlib.blake2b(head + self.node, digest_size=32).digest()

    def __str__(self) -> str:
        return f"{self.node.hex()[:12]}/layer{self.layer}/{self.kind}" + (
            f"@{self.graph}" if self.graph else ""
        )
