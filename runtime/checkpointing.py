"""Putting a model's layers under checkpointing for the time of a capture."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from torch import nn
from torch.utils.checkpoint import checkpoint

from tiercache.runtime.forwards import replaced_forwards


@contextmanager
def own_checkpointing_off(layers: list[nn.Module]) -> Iterator[None]:
    """Switches off the layers' own checkpointing: a recomputation must save what the forward saved."""
    switched = [layer for layer in layers if getattr(layer, "gradient_checkpointing", False)]
    for layer in switched:
        layer.gradient_checkpointing = False  # type: ignore[assignment]
    try:
        yield
    finally:
        for layer in switched:
            layer.gradient_checkpointing = True  # type: ignore[assignment]


@contextmanager
def checkpointed(layers: list[nn.Module], *, preserve_rng_state: bool) -> Iterator[None]:
    """Runs each layer's forward under non-reentrant checkpointing, so that autograd keeps its inputs only."""
    forwards = [
        (
            layer,
            partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=preserve_rng_state),
        )
        for layer in layers
    ]
    with own_checkpointing_off(layers), replaced_forwards(forwards):
        yield
