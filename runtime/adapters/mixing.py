"""Finds layers that mix tokens behind the attention function's back.

Every token of the probe is a node of its own, so attention shows each token itself and nothing else. If the
output of a module for one token still depends on another token, it carries context in a way that no page
holds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from tiercache.errors import ModelRefusedError
from tiercache.runtime.adapters.base import ModelAdapter
from tiercache.runtime.frame import Frame, Piece

_NUM_TOKENS = 11
_CHANGED = 4  # the token that differs between the two runs
_RELATIVE = {torch.float64: 1e-5, torch.float32: 1e-4}  # batch-dependent rounding stays far below
_RELATIVE_HALF = 0.05


Call = tuple[list[torch.Tensor], list[torch.Tensor]]


@dataclass(slots=True)
class _Watch:
    """Hooks that keep what every module got and gave; and the innermost module that is running.

    Attributes:
        running: names of the modules that are running, outermost first.
        calls: of each module that ended.
        seen: per-token inputs and outputs of every call that ended, innermost first, by module and count.
    """

    running: list[str] = field(default_factory=list)
    calls: Counter[str] = field(default_factory=Counter)
    seen: dict[tuple[str, int], Call] = field(default_factory=dict)

    @contextmanager
    def on(self, model: nn.Module) -> Iterator[None]:
        handles = []
        for name, module in model.named_modules():

            def enter(*_: Any, name: str = name) -> None:
                self.running.append(name)

            def leave(_: nn.Module, args: Any, kwargs: Any, output: Any, name: str = name) -> None:
                self.running.pop()
                self.calls[name] += 1
                self.seen[name, self.calls[name]] = (_per_token((args, kwargs)), _per_token(output))

            handles.append(module.register_forward_pre_hook(enter, with_kwargs=True))
            handles.append(module.register_forward_hook(leave, with_kwargs=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


def _per_token(value: Any) -> list[torch.Tensor]:
    """Copies of the tensors in a module's arguments or results that have one line a token."""
    if isinstance(value, torch.Tensor):
        one_line = value.ndim >= 2 and value.shape[:2] == (1, _NUM_TOKENS) and value.is_floating_point()
        return [value.detach().clone()] if one_line else []
    if isinstance(value, dict):
        value = list(value.values())
    return [t for item in value for t in _per_token(item)] if isinstance(value, list | tuple) else []


def refuse_hidden_mixing(adapter: ModelAdapter) -> None:
    """Raises where a module mixes tokens without the attention function.

    Args:
        adapter: of a model whose attention function is bound; its parameters are not changed.

    Raises:
        ModelRefusedError: names the module, or the one whose forward failed without a causal mask.
    """
    first = torch.arange(1, _NUM_TOKENS + 1) % adapter.vocab_size
    second = first.clone()
    second[_CHANGED] = (second[_CHANGED] + adapter.vocab_size // 2) % adapter.vocab_size
    before, after = _run(adapter, first), _run(adapter, second)
    for (name, call), (inputs, outputs) in before.items():
        other_inputs, other_outputs = after.get((name, call), ([], []))
        if _leak(outputs, other_outputs) and not _leak(inputs, other_inputs):
            module = adapter.model.get_submodule(name)
            raise ModelRefusedError(
                f"{name} ({type(module).__name__}) carries tokens into each other past attention",
                remedy="use a model whose every token-mixing layer calls Transformers' attention interface "
                "or prefix_attention",
            )


def _leak(before: list[torch.Tensor], after: list[torch.Tensor]) -> bool:
    others = [i for i in range(_NUM_TOKENS) if i != _CHANGED]
    for a, b in zip(before, after, strict=False):
        difference = (a[:, others].double() - b[:, others].double()).norm()
        if difference > _RELATIVE.get(a.dtype, _RELATIVE_HALF) * a[:, others].double().norm():
            return True
    return False


def _run(adapter: ModelAdapter, ids: torch.Tensor) -> dict[tuple[str, int], Call]:
    pieces = [Piece(i, b"", i, i + 1, 0) for i in range(_NUM_TOKENS)]
    nothing: Any = None  # no token of the probe has an ancestor, so no page is read or written
    frame = Frame(nothing, 0, pieces, [], adapter.device, "score")
    positions = torch.zeros(1, _NUM_TOKENS, dtype=torch.int64, device=adapter.device)
    watch = _Watch()
    with adapter.attached(1), adapter.router.running(frame), watch.on(adapter.model), torch.no_grad():
        try:
            adapter.hidden(ids[None].to(adapter.device), positions)
        except Exception as error:
            name = watch.running[-1] if watch.running else ""
            module = adapter.model.get_submodule(name)
            raise ModelRefusedError(
                f"{name or 'the model'} ({type(module).__name__}) does not run under the attention function",
                got=f"{type(error).__name__}: {error}",
                remedy="use a model whose attention goes through Transformers' attention interface",
            ) from error
    return watch.seen
