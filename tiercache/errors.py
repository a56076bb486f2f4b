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

from tiercache.policies.errors import ConfigError, PolicyError, TierCacheError, TraceError

__all__ = [
    "CodecError",
    "ConfigError",
    "InputError",
    "LossError",
    "ModelRefusedError",
    "PageCorruptError",
    "PageMissingError",
    "PageStateError",
    "ParameterChangedError",
    "PlanError",
    "PolicyError",
    "RankFailedError",
    "SavedTensorChangedError",
    "StoreClosedError",
    "StoreError",
    "StoreForkedError",
    "StoreLockedError",
    "StoreTimeoutError",
    "TierCacheError",
    "TierFullError",
    "TierIOError",
    "TraceError",
]


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


class PlanError(TierCacheError, ValueError):
    """An access plan or hardware plan that cannot be carried out."""


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
