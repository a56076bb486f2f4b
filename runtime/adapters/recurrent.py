"""Transformers layers with a recurrent or convolution state: they get the parent's state where they take a cache.

Only these layers see a cache, and only during a step: attention layers keep to the attention function. The
tails of a visit lie packed one after the other; such a layer gets them side by side, each from its parent's
state.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint

from tiercache.errors import ConfigError
from tiercache.runtime.adapters.base import Router
from tiercache.runtime.adapters.code import takes_cache, written_forward
from tiercache.runtime.adapters.selective_scan import scanning, scans_continued
from tiercache.runtime.forwards import Forward, replaced_forwards
from tiercache.runtime.frame import Frame
from tiercache.runtime.states import LayerStates

SHORTEST_NODE = 2  # tokens below a parent: layers take one token for a step of generation, without a graph
_ASKS = {
    "get_conv_state",
    "get_recurrent_state",
    "update_conv_state",
    "update_recurrent_state",
    "get_linear_cache",
}


def state_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Modules, by name, whose forward asks a cache for states."""
    return {name: module for name, module in model.named_modules() if takes_cache(module, _ASKS)}


@contextmanager
def states_led(layers: dict[str, nn.Module], router: Router) -> Iterator[None]:
    """Makes each layer read and write its states in the visit that `router` names."""
    forwards = [
        (layer, partial(_run, layer.forward, router, index, name))
        for index, (name, layer) in enumerate(layers.items())
    ]
    with replaced_forwards(forwards), scans_continued(written_forward(layer) for layer in layers.values()):
        yield


def _run(
    forward: Forward,
    router: Router,
    index: int,
    name: str,
    hidden_states: torch.Tensor,
    *args: Any,
    **kwargs: Any,
) -> Any:
    if router.frame is None:
        raise ConfigError(
            f"{name} was called outside a visit", remedy="call the model through BranchReplay, or detach it"
        )
    frame = router.frame
    states = LayerStates(frame, index, name, len(frame.pieces))
    kwargs |= {"cache": states, "attention_mask": None}  # nothing is padded
    call = partial(_call, forward, states)
    if frame.keep_graph:  # a scan's graph has as many parts as the node has chunks: it is recomputed instead
        call = partial(checkpoint, call, use_reentrant=False)
    output = call(_side_by_side(hidden_states, frame), *args, **kwargs)
    out = output[0] if isinstance(output, tuple) else output
    relayed = states.relay(_one_after_the_other(out, frame))
    return (relayed, *output[1:]) if isinstance(output, tuple) else relayed


def _call(forward: Forward, states: LayerStates, *args: Any, **kwargs: Any) -> Any:
    with scanning(states):
        return forward(*args, **kwargs)


def _side_by_side(packed: torch.Tensor, frame: Frame) -> torch.Tensor:
    """[1, T, E] -> [G, R, E], padded with zeros at the end, where no token looks."""
    lengths = [piece.end - piece.begin for piece in frame.pieces]
    if len(lengths) == 1 and (lengths[0] >= SHORTEST_NODE or not frame.ancestors):
        return packed
    lines = pad_sequence(list(packed[0].split(lengths)), batch_first=True)
    return nn.functional.pad(lines, (0, 0, 0, max(0, SHORTEST_NODE - lines.shape[1])))


def _one_after_the_other(lines: torch.Tensor, frame: Frame) -> torch.Tensor:
    """[G, R, E] -> [1, T, E]."""
    if len(frame.pieces) == 1:
        return lines[:, : frame.num_tokens]
    parts = [line[: p.end - p.begin] for line, p in zip(lines, frame.pieces, strict=True)]
    return torch.cat(parts)[None]
