"""Models whose layers repeat: rehearsed with few of them, priced with all."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

from torch import nn

from tiercache.runtime.planning.counting import Work
from tiercache.runtime.planning.ledger import Traffic
from tiercache.runtime.planning.rehearsal import Rehearsal, Visited
from tiercache.runtime.probe import Shape


def repeating(layers: list[nn.Module]) -> tuple[int, int]:
    """(begin, period): from `begin` on, layers repeat with this period; both are as small as can be.

    The period is the number of layers where nothing repeats three times.
    """
    kinds = [_kind(layer) for layer in layers]
    best = (0, len(kinds))
    for period in range(1, len(kinds) // 3 + 1):
        begin = len(kinds) - period
        while begin > 0 and kinds[begin - 1] == kinds[begin - 1 + period]:
            begin -= 1
        begin += (len(kinds) - begin) % period  # whole periods
        if (len(kinds) - begin) >= 3 * period and begin + 2 * period < best[0] + 2 * best[1]:
            best = (begin, period)
    return best


def _kind(layer: nn.Module) -> tuple[Any, ...]:
    windows = [getattr(m, "sliding_window", None) for m in layer.modules()]
    return (
        tuple(type(m).__name__ for m in layer.modules()),
        tuple((name, tuple(p.shape)) for name, p in layer.named_parameters()),
        tuple(w if isinstance(w, int) else None for w in windows),
    )


def cut_layers(model: nn.Module, layers: list[nn.Module], count: int) -> None:
    """Leaves the first `count` of a model's layers, in place."""
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and list(module) == layers:
            del module[count:]


def extend_rehearsal(small: Rehearsal, large: Rehearsal, times: float) -> Rehearsal:
    """`small` and `times` what `large` has more: each period of layers costs the same."""
    visits = {
        kind: [
            _extend_visit(a, b, times) for a, b in zip(small.visits[kind], large.visits[kind], strict=True)
        ]
        for kind in small.visits
    }
    sums = small.sum_bytes + round(times * (large.sum_bytes - small.sum_bytes))
    fixed = {kind: work.plus(large.fixed[kind].plus(work, -1.0), times) for kind, work in small.fixed.items()}
    half = None
    if small.half is not None and large.half is not None:
        half = extend_rehearsal(small.half, large.half, times)
    return Rehearsal(small.sizes, small.sizes, visits, sums, fixed, half)


def _extend_visit(a: Visited, b: Visited, times: float) -> Visited:
    more: Work = b.work.plus(a.work, -1.0)
    traffic = Traffic(
        _extend_counts(a.traffic.num_bytes, b.traffic.num_bytes, times),
        _extend_counts(a.traffic.calls, b.traffic.calls, times),
    )
    return Visited(
        a.work.plus(more, times), traffic, a.peak_bytes + round(times * (b.peak_bytes - a.peak_bytes))
    )


def _extend_counts(
    a: Counter[tuple[str, str]], b: Counter[tuple[str, str]], times: float
) -> Counter[tuple[str, str]]:
    return Counter({key: a[key] + round(times * (b[key] - a[key])) for key in b})


def extend_shape(small: Shape, large: Shape, times: int) -> Shape:
    """The shape of the whole model."""
    repeated = large.layers[len(small.layers) :]
    more = large.activation_bytes_per_token - small.activation_bytes_per_token
    return replace(
        small,
        layers=small.layers + repeated * times,
        activation_bytes_per_token=small.activation_bytes_per_token + times * more,
    )
