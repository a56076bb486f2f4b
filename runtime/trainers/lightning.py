"""Activation offload for Lightning, as a callback or as a precision plugin."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lightning.pytorch.callbacks import Callback
from lightning.pytorch.plugins.precision import Precision

from tiercache.runtime.offloading import offload


class TierCallback(Callback):
    """Lets a store keep what autograd saves in `training_step`: `Trainer(callbacks=[TierCallback(store)])`.

    Works beside any precision plugin. Gradients are bit for bit those without it.

    Args:
        store: a `tiercache.TierStore`; stays the caller's to close, after `fit()` has returned.
        options: of `tiercache.runtime.offload`.
    """

    def __init__(self, store: Any, **options: Any) -> None:
        self._offload = offload(store, **options)

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Wraps the module's training step."""
        step = pl_module.training_step

        @functools.wraps(step)
        def run(*args: Any, **kwargs: Any) -> Any:
            with self._offload:
                return step(*args, **kwargs)

        pl_module.training_step = run

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        """Gives the module its own training step back."""
        vars(pl_module).pop("training_step", None)


class TierPrecision(Precision):
    """The same as a plugin of full precision: `Trainer(plugins=[TierPrecision(store)])`.

    Args:
        store: a `tiercache.TierStore`; stays the caller's to close, after `fit()` has returned.
        options: of `tiercache.runtime.offload`.
    """

    def __init__(self, store: Any, **options: Any) -> None:
        self._offload = offload(store, **options)

    @contextmanager
    def train_step_context(self) -> Iterator[None]:
        """Around each training step."""
        with self._offload, super().train_step_context():
            yield
