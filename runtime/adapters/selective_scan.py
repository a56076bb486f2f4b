"""Selective scans that start from zero, continued from a state.

Transformers' Mamba layers scan without an initial state, and the kernel for it gives a last state without a
gradient. The scan is linear in the state: what it adds to every output is added here, the decay from the node's
beginning times the state, and the end state is summed here. The function is found where the layers find it, in
the globals of their module, and is their own again when the step ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch.nn import functional

from tiercache.errors import ModelRefusedError
from tiercache.runtime.states import LayerStates

_NAME = "mamba_selective_scan"
# The layer calls that are running, innermost last. Process-wide and not thread-local: autograd recomputes layers
# on threads of its own.
_running: list[LayerStates] = []


@contextmanager
def scans_continued(forwards: Iterable[Any]) -> Iterator[None]:
    """Lets the scans that these functions call start from the state of the layer call that is running."""
    with ExitStack() as stack:
        for table in {id(f.__globals__): f.__globals__ for f in forwards if _NAME in f.__globals__}.values():
            stack.callback(table.__setitem__, _NAME, table[_NAME])
            table[_NAME] = partial(_scan, table[_NAME])
        yield


@contextmanager
def scanning(states: LayerStates) -> Iterator[None]:
    """Makes a layer call the one that is running."""
    _running.append(states)
    try:
        yield
    finally:
        _running.pop()


def _scan(
    scan: Callable[..., Any],
    inputs: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    *args: Any,
    z: torch.Tensor | None = None,
    delta_bias: torch.Tensor | None = None,
    delta_softplus: bool = False,
    return_last_state: bool = False,
    **kwargs: Any,
) -> Any:
    """[B, I, T] outputs of inputs and dt [B, I, T], A [I, N], B and C [B, N, T]; with the state [B, I, N] if asked."""
    options = {"delta_bias": delta_bias, "delta_softplus": delta_softplus, **kwargs}
    if not _running:
        return scan(inputs, dt, A, B, C, *args, z=z, return_last_state=return_last_state, **options)
    state = _running[-1].get_recurrent_state()
    if state is not None and state.ndim != dt.ndim:
        raise ModelRefusedError(
            f"{_running[-1].name}: its selective scan runs head by head from zero, with no place for a state",
            remedy="use a model whose scan takes or gives one state a layer",
        )
    out = scan(inputs, dt, A, B, C, *args, z=None, return_last_state=False, **options)
    delta = dt if delta_bias is None else dt + delta_bias.to(dt.dtype)[..., None]
    delta = functional.softplus(delta) if delta_softplus else delta
    delta = delta.to(torch.promote_types(delta.dtype, A.dtype))  # time passed adds up over the whole node
    passed = delta.cumsum(-1)
    if state is not None:
        decay = torch.exp(A[None, :, None, :] * passed[..., None])  # [B, I, T, N]
        out = out + torch.einsum("bitn,bin,bnt->bit", decay, state.to(decay.dtype), C.to(decay.dtype)).to(
            out.dtype
        )
    out = out if z is None else out * functional.silu(z)
    return (out, _end_state(inputs * delta, passed, A, B, state)) if return_last_state else out


def _end_state(
    steps: torch.Tensor, passed: torch.Tensor, A: torch.Tensor, B: torch.Tensor, state: torch.Tensor | None
) -> torch.Tensor:
    """[B, I, N] of steps and passed time [B, I, T]. The fast kernel gives a last state without a gradient."""
    left = passed[..., -1:] - passed
    decay = torch.exp(A[None, :, None, :] * left[..., None])
    end = torch.einsum("bitn,bit,bnt->bin", decay, steps.to(decay.dtype), B.to(decay.dtype))
    return end if state is None else end + torch.exp(A * passed[..., -1:]) * state
