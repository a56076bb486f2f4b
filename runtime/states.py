"""Recurrent and convolution states: what a layer remembers of its whole prefix, in a page of fixed size.

A node reads the states at the end of its parent and, when it is captured, writes those at its own end. Their
gradients travel like those of keys and values: what the children send back is summed in a gradient page,
and the pop of the node drives it into the layer that made the state.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from tiercache.entry import PageKey
from tiercache.runtime.frame import Frame
from tiercache.runtime.pages import check_recomputed

RECURRENT, CONVOLUTION = "state", "conv_state"


def is_state(kind: str) -> bool:
    """Whether pages of this kind, or the pages whose gradient sums they are, have a size of their own."""
    return kind.removeprefix("grad_").startswith((RECURRENT, CONVOLUTION))


class LayerStates:
    """One layer's states in one visit; stands where the layer takes its cache.

    Its methods are those of Transformers' caches for recurrent layers. Nothing is written in place: a state is
    handed out as a leaf of its own, and what the layer gives back is kept with its graph.

    Args:
        frame: the visit.
        index: of the layer among those with states.
        name: of the layer.
        batch: tails that go through the layer side by side; each starts from the parent's state.
    """

    def __init__(self, frame: Frame, index: int, name: str, batch: int) -> None:
        self.frame, self.index, self.name, self.batch = frame, index, name, batch
        self._parents: dict[str, torch.Tensor] = {}
        self.ends: dict[str, torch.Tensor] = {}

    def _parent(self, kind: str) -> torch.Tensor | None:
        """[B, ...] state of the parent node's end; its gradient goes to the store."""
        if not self.frame.ancestors:
            return None
        if kind not in self._parents:
            parent, graph = self.frame.ancestors[-1], self.frame.graph
            with self.frame.store.read(PageKey(parent.digest, self.index, kind)) as lease:
                state = lease.tensor.detach().clone()
            if parent.trainable and torch.is_grad_enabled():
                gradient_key, store = (
                    PageKey(parent.digest, self.index, f"grad_{kind}", graph),
                    self.frame.store,
                )
                state.requires_grad_().register_hook(lambda grad: store.accumulate(gradient_key, grad))
            self._parents[kind] = state.expand(self.batch, *state.shape[1:])
        return self._parents[kind]

    def is_recording_past(self, layer_idx: int | None = None) -> bool:
        """True keeps layers from updating a convolution state in place when they get one token."""
        del layer_idx
        return True

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        """Whether the node has a parent."""
        del layer_idx, state_idx
        return bool(self.frame.ancestors)

    def get_conv_state(self, layer_idx: int | None = None, state_idx: int = 0) -> torch.Tensor | None:
        """[B, C, K] last inputs of the convolution at the parent's end, None at a root."""
        del layer_idx
        return self._parent(_kind(CONVOLUTION, state_idx))

    def get_recurrent_state(self, layer_idx: int | None = None, state_idx: int = 0) -> torch.Tensor | None:
        """[B, ...] at the parent's end, None at a root."""
        del layer_idx
        return self._parent(_kind(RECURRENT, state_idx))

    def update_conv_state(
        self,
        conv_states: torch.Tensor,
        layer_idx: int | None = None,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
        **_: Any,
    ) -> torch.Tensor:
        """[B, C, K + n]: the parent's last inputs, then these; keeps the last K of both as the end state."""
        del layer_idx
        kind = _kind(CONVOLUTION, state_idx)
        parent = self._parent(kind)
        seen = conv_states if parent is None else torch.cat([parent, conv_states], -1)
        width = conv_kernel_size or (conv_states if parent is None else parent).shape[-1]
        end = seen[..., -width:]
        self.ends[kind] = nn.functional.pad(end, (width - end.shape[-1], 0))
        return seen

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, layer_idx: int | None = None, state_idx: int = 0, **_: Any
    ) -> torch.Tensor:
        """Keeps the state at this node's end, and returns it."""
        del layer_idx
        self.ends[_kind(RECURRENT, state_idx)] = recurrent_states
        return recurrent_states

    def get_linear_cache(self, layer_idx: int | None = None) -> torch.Tensor | None:
        """The recurrent state, under the name by which MiniMax's layers ask for it."""
        return self.get_recurrent_state(layer_idx)

    def set_linear_cache(self, layer_idx: int | None, linear_cache: torch.Tensor) -> None:
        """Keeps the recurrent state at this node's end."""
        self.update_recurrent_state(linear_cache, layer_idx)

    def relay(self, out: torch.Tensor) -> torch.Tensor:
        """`out` itself; at capture the end states become pages, at pop their gradient pages join `out`'s."""
        if self.frame.phase not in ("capture", "pop") or not self.ends:
            return out
        relayed: torch.Tensor = _Relay.apply(out, self, *self.ends.values())  # type: ignore[no-untyped-call]
        return relayed


class _Relay(torch.autograd.Function):
    """Passes a layer's output on. Its backward comes before the layer's own, with what the states owe."""

    @staticmethod
    def forward(ctx: Any, out: torch.Tensor, states: LayerStates, *ends: torch.Tensor) -> torch.Tensor:
        ctx.states = (states.frame, states.index, tuple(states.ends), tuple(end.dtype for end in ends))
        frame, node = states.frame, states.frame.pieces[0].digest
        for kind, end in zip(states.ends, ends, strict=True):
            key = PageKey(node, states.index, kind)
            if frame.phase == "capture":
                frame.store.put(key, end.detach())
            elif frame.debug:
                check_recomputed(frame.store, key, end, states.name)
        return out.view_as(out)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        frame, index, kinds, dtypes = ctx.states
        node = frame.pieces[0].digest
        owed: list[torch.Tensor | None] = []
        for kind, dtype in zip(kinds, dtypes, strict=True):
            total = frame.store.take(PageKey(node, index, f"grad_{kind}", frame.graph))
            owed.append(None if total is None else total.to(dtype))
        return (grad, None, *owed)


def _kind(kind: str, state_idx: int) -> str:
    return f"{kind}_{state_idx}" if state_idx else kind
