"""Discards: references that callers drop at once, and those that finalizers drop."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from tiercache.entry import Entry, PageKey
from tiercache.placement import Books


class Discards:
    """References that are dropped. All but `drop_later` run under the store's lock."""

    def __init__(self, books: Books) -> None:
        self._books = books
        self._unwanted: deque[PageKey] = deque()

    def drop(self, entry: Entry) -> None:
        """Drops one reference, and the page with the last."""
        entry.refs -= 1
        if entry.refs == 0:
            self._books.bury(entry)

    def drop_graph(self, graph: int) -> None:
        """Drops every page of a graph, whatever its references."""
        for key in list(self._books.graphs.get(graph, ())):
            self._books.bury(self._books.table[key])

    def drop_later(self, keys: Iterable[PageKey]) -> None:
        """Notes references that go; takes no lock."""
        self._unwanted.extend(keys)

    def collect(self) -> None:
        """Drops what was noted."""
        while self._unwanted:
            entry = self._books.table.get(self._unwanted.popleft())
            if entry is not None:
                self.drop(entry)
