"""The root of the tree of errors, and those that policies and traces raise; `tiercache.errors` draws the whole tree.

They stand here because imports go one way: policies know nothing of the store.
"""

from __future__ import annotations


class TierCacheError(Exception):
    """Base of every error that tiercache raises on purpose.

    Args:
        what: the operation and the key or field it was about.
        got: what was found.
        limit: what would have been accepted.
        remedy: what the caller can do.
    """

    def __init__(
        self, what: str, *, got: object = None, limit: object = None, remedy: str | None = None
    ) -> None:
        self.what = what
        self.got = got
        self.limit = limit
        self.remedy = remedy
        parts = [what]
        if got is not None:
            parts.append(f"got {got}")
        if limit is not None:
            parts.append(f"limit {limit}")
        text = "; ".join(parts)
        if remedy is not None:
            text += f". {remedy[0].upper()}{remedy[1:]}"
        self.message = text
        super().__init__(text)

    def __str__(self) -> str:
        return self.message


class ConfigError(TierCacheError, ValueError):
    """An argument or option that cannot be meant."""


class PolicyError(TierCacheError, ValueError):
    """A policy's hook or parameter is wrong."""


class TraceError(TierCacheError, ValueError):
    """A trace that cannot be read."""
