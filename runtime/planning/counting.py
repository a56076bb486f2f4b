"""Counting what a stretch of work computes, moves and holds, while it runs on tensors without bytes."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from tiercache.profile import Profile

_BACKWARD_PRODUCTS = 2.5  # of attention: five matrix products where the forward has two
_MAPPED_BYTES = 32 << 20  # glibc gives tensors of that size back at once, and never had them before
_PICKING = (
    "aten::embedding",
    "aten::index_select",
    "aten::gather",
)  # read of their source what they give out
_NO_WORK = (
    "aten::detach",
    "aten::empty",
    "aten::new_empty",
    "aten::empty_like",
    "aten::empty_strided",
    "aten::_unsafe_view",
)


@dataclass(slots=True)
class Work:
    """What was computed.

    Attributes:
        matmul_flops, attention_flops: floating-point operations.
        moved_bytes: what elementwise operators read and write.
        num_ops: operators that do work.
        matmul_s, attention_s, elementwise_s, op_s: seconds of each on the profile's machine.
        fresh_s: seconds to get memory that had been given back.
    """

    matmul_flops: float = 0.0
    attention_flops: float = 0.0
    moved_bytes: float = 0.0
    num_ops: float = 0.0
    matmul_s: float = 0.0
    attention_s: float = 0.0
    elementwise_s: float = 0.0
    op_s: float = 0.0
    fresh_s: float = 0.0

    @property
    def seconds(self) -> float:
        """All of it, one after the other."""
        return self.matmul_s + self.attention_s + self.elementwise_s + self.op_s + self.fresh_s

    def plus(self, other: Work, times: float = 1.0, ops_times: float | None = None) -> Work:
        """The sum of this and `times` the other; its fixed costs may count another number of times."""
        sums = []
        for name in _FIELDS:
            is_op = name in ("num_ops", "op_s") and ops_times is not None
            sums.append(getattr(self, name) + (ops_times if is_op else times) * getattr(other, name))
        return Work(*sums)

    def at_least_once(self) -> Work:
        """What may come once a visit, none of it below zero: neither attention nor new memory goes with tokens."""
        never = ("attention_flops", "attention_s", "fresh_s")
        return Work(*(0.0 if name in never else max(0.0, getattr(self, name)) for name in _FIELDS))


_FIELDS = tuple(f.name for f in fields(Work))


class WorkCounter(TorchDispatchMode):
    """Adds up the work of every operator inside the block, and follows the bytes of what is alive.

    To be entered inside a `FakeTensorMode`. Matrix products cost the longer of their arithmetic and of reading their
    operands, on a host both one after the other: a core that waits for memory does not multiply. All else costs the
    bytes that it reads and writes.

    Attributes:
        work: since the last `reset`.
        live_bytes: of tensors made inside the block and not freed.
        peak_bytes: most of them since the last `reset`.
    """

    def __init__(self, profile: Profile) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._profile = profile
        self._on_host = profile.machine is not None and profile.machine.accelerator is None
        self._known: dict[int, int] = {}
        self._silent = 0
        self.work = Work()
        self.live_bytes = 0
        self.peak_bytes = 0
        self._had_bytes = 0  # memory that the process has: more than is alive is new to it
        self._mapped_bytes = 0  # of the operator's tensors that the C library asks the system for one by one

    def released(self) -> None:
        """Memory that is not alive was given back."""
        self._had_bytes = self.live_bytes

    def reset(self) -> None:
        """Begins a new stretch: nothing is counted yet, and what is alive is the peak so far."""
        self.work = Work()
        self.peak_bytes = self.live_bytes

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """Tensors made inside are somebody else's memory, and their making is no work."""
        self._silent += 1
        try:
            yield
        finally:
            self._silent -= 1

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Runs one operator and counts it."""
        out = func(*args, **(kwargs or {}))
        outputs = [x for x in tree_leaves(out) if isinstance(x, torch.Tensor)]
        inputs = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        for tensor in outputs:
            self._note(tensor, inputs)
        if self._silent:
            return out
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        fresh_bytes = max(self._mapped_bytes, self.live_bytes - self._had_bytes)
        self.work.fresh_s += fresh_bytes * self._profile.fresh_s_per_byte
        self._had_bytes, self._mapped_bytes = max(self._had_bytes, self.live_bytes), 0
        name = func.name().partition(".")[0]
        if not func.is_view and name.startswith("aten::") and name not in _NO_WORK:
            self._price(func, args, kwargs or {}, out, inputs, outputs)
        return out

    def _note(self, tensor: torch.Tensor, inputs: list[torch.Tensor]) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata  # noqa: SLF001 - the storage's address, which has no public name
        if key in self._known or any(_id_of(x) == key for x in inputs):
            return
        size = 0 if self._silent else int(storage.nbytes())
        self._known[key] = size
        self.live_bytes += size
        self._mapped_bytes += size if size >= _MAPPED_BYTES else 0
        weakref.finalize(storage, self._forget, key)

    def _forget(self, key: int) -> None:
        self.live_bytes -= self._known.pop(key, 0)

    def _price(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        out: Any,
        inputs: list[torch.Tensor],
        outputs: list[torch.Tensor],
    ) -> None:
        profile, work = self._profile, self.work
        touched = (*outputs, *outputs) if func.name() in _PICKING else (*inputs, *outputs)
        moved = sum(x.numel() * x.element_size() for x in touched)
        work.num_ops += 1
        work.op_s += profile.op_s
        name = func.name()
        if "attention" in name:
            speed = profile.computing(inputs[0].dtype)
            flops, queries = _attention(args)
            backward = "backward" in name
            flops *= _BACKWARD_PRODUCTS if backward else 1.0
            work.attention_flops += flops
            work.attention_s += speed.attention_s(flops, queries, backward=backward)
        elif func.overloadpacket in flop_registry:
            speed = profile.computing(inputs[0].dtype)
            flops = float(flop_registry[func.overloadpacket](*args, **kwargs, out_val=out))
            work.matmul_flops += flops
            arithmetic_s = speed.matmul_s(flops, min(min(x.shape[-2:]) for x in (*inputs[-2:], *outputs)))
            memory_s = moved / profile.memory_bytes_per_s
            work.matmul_s += arithmetic_s + memory_s if self._on_host else max(arithmetic_s, memory_s)
        else:
            work.moved_bytes += moved
            work.elementwise_s += moved / profile.memory_bytes_per_s


def _id_of(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)  # noqa: SLF001


def _attention(args: tuple[Any, ...]) -> tuple[float, float]:
    """Floating-point operations of two products of every query with every key it sees, and queries that see as many.

    A causal block sees half, in strips that are a quarter as long on the average.
    """
    tensors = [x for x in args if isinstance(x, torch.Tensor) and x.dim() == 4]
    q, k = (tensors[0], tensors[1]) if len(tensors) < 5 else (tensors[1], tensors[2])
    causal = any(x is True for x in args)
    batch, heads, length, width = q.shape
    flops = 4.0 * batch * heads * length * k.shape[2] * width
    return (0.5 * flops, 0.25 * length) if causal else (flops, length)
