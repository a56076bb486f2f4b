"""Errors of tiercache, one tree.

TierCacheError
├── ConfigError (ValueError)          an argument or option that cannot be meant
├── InputError (ValueError)           rows, masks or scored positions that cannot be trained on
├── StoreError
│   ├── StoreClosedError              the store was used after close()
│   ├── StoreLockedError              another process writes to this directory
│   ├── StoreForkedError              a forked child used its parent's store
│   ├── StoreTimeoutError (TimeoutError)  a wait reached its deadline
│   ├── PageMissingError (KeyError)   no such page, with the reason of the miss
│   ├── PageStateError                an operation that the page's state forbids
│   ├── PageCorruptError              a record failed its own proof
│   ├── TierFullError                 a tier cannot take a page, with need, have and remedy
│   └── TierIOError (OSError)         the operating system refused a read, write or sync
├── CodecError (ValueError)           bytes or tensors that a codec cannot take
├── PolicyError (ValueError)          a policy's hook or parameter is wrong
├── PlanError (ValueError)            an access plan or hardware plan that cannot be carried out
├── TraceError (ValueError)           a trace that cannot be read
├── ModelRefusedError                 a model whose gradient would be silently wrong
├── SavedTensorChangedError (RuntimeError)  a tensor saved for backward was changed in place
├── ParameterChangedError             weights changed between capture and pop
├── RankFailedError (RuntimeError)    another rank failed in this step
└── LossError (ValueError)            loss_fn returned something that is no loss
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


class InputError(TierCacheError, ValueError):
    """Rows, masks or scored positions that cannot be trained on."""


class StoreError(TierCacheError):
    """Base of the store's errors."""


class StoreClosedError(StoreError):
    """The store was used after close()."""


class StoreLockedError(StoreError):
    """Another process writes to this directory."""


class StoreForkedError(StoreError):
    """A forked child used its parent's store."""


class StoreTimeoutError(StoreError, TimeoutError):
    """A wait reached its deadline."""


class PageMissingError(StoreError, KeyError):
    """No such page; the reason of the miss is in the message."""


class PageStateError(StoreError):
    """An operation that the page's state forbids."""


class PageCorruptError(StoreError):
    """A record failed its own proof."""


class TierFullError(StoreError):
    """A tier cannot take a page; the message has need, have and remedy."""


class TierIOError(StoreError, OSError):
    """The operating system refused a read, write or sync; `errno` is the original one."""


class CodecError(TierCacheError, ValueError):
    """Bytes or tensors that a codec cannot take."""


class PolicyError(TierCacheError, ValueError):
    """A policy's hook or parameter is wrong."""


class PlanError(TierCacheError, ValueError):
    """An access plan or hardware plan that cannot be carried out."""


class TraceError(TierCacheError, ValueError):
    """A trace that cannot be read."""


class ModelRefusedError(TierCacheError):
    """A model whose gradient would be silently wrong; names the layer and the reason."""


class ParameterChangedError(TierCacheError):
    """Weights changed between capture and pop; names the parameter."""


class SavedTensorChangedError(TierCacheError, RuntimeError):
    """A tensor that was saved for backward was changed in place since."""


class RankFailedError(TierCacheError, RuntimeError):
    """Another rank failed in this step; names the rank and its error."""


class LossError(TierCacheError, ValueError):
    """loss_fn returned something that is no loss."""
