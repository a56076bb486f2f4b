"""The model that rehearsals run on: whole where its layers differ, else two short ones that stand for it."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from tiercache.profile import Profile
from tiercache.runtime.adapters import create_adapter
from tiercache.runtime.engine import Engine
from tiercache.runtime.kernels import accumulator_dtype
from tiercache.runtime.options import PrefixActivations, ReplayOptions
from tiercache.runtime.planning.layers import cut_layers, extend_rehearsal, extend_shape, repeating
from tiercache.runtime.planning.model import Outline, build_model, outline_of
from tiercache.runtime.planning.rehearsal import Rehearsal, Sizes, rehearse
from tiercache.runtime.probe import Shape

_ROW_TOKENS = 4096  # for what of a forward depends on the longest row; no cost does


class _NoStore:
    """As much of a store as an engine asks for before its first access."""

    def __init__(self) -> None:
        self.config = self
        self.device_bytes = 1 << 30
        self._graphs = 0

    def new_graph(self) -> int:
        """An id."""
        self._graphs += 1
        return self._graphs

    def span(self, name: str) -> AbstractContextManager[None]:
        """Nothing."""
        del name
        return nullcontext()


@dataclass(slots=True)
class Stage:
    """Models without bytes; every method runs inside `without_bytes`.

    Attributes:
        outline: of the whole model.
        models: the whole model, or two with one and two periods of its layers.
        times: periods that the smaller one lacks; 0 for the whole model.
    """

    outline: Outline
    models: list[nn.Module]
    times: int
    _probed: dict[PrefixActivations, list[tuple[Engine, Shape]]] = field(default_factory=dict)
    _rehearsed: dict[tuple[ReplayOptions, Sizes, int], Rehearsal] = field(default_factory=dict)

    @classmethod
    def of(cls, config: Any, dtype: torch.dtype) -> Stage:
        """Builds them. Raises ConfigError for what is no causal language model."""
        whole = build_model(config, dtype)
        layers = create_adapter(whole).layers
        outline = outline_of(whole, len(layers))
        begin, period = repeating(layers)
        if period == len(layers):
            return cls(outline, [whole], 0)
        models = [build_model(config, dtype), whole]
        for count, model in zip((begin + period, begin + 2 * period), models, strict=True):
            cut_layers(model, create_adapter(model).layers, count)
        return cls(outline, models, (len(layers) - begin - period) // period)

    @property
    def sum_bytes(self) -> int:
        """Of the gradient sums of all parameters."""
        return self.outline.num_parameters * accumulator_dtype(self.outline.dtype).itemsize

    def shape(self, kept: PrefixActivations = "recompute") -> Shape:
        """The whole model as the store sees it when captures keep this."""
        if kept not in self._probed:
            options = ReplayOptions(check_model=False, prefix_activations=kept)
            self._probed[kept] = [self._probe(model, options) for model in self.models]
        shapes = [shape for _, shape in self._probed[kept]]
        return shapes[0] if not self.times else extend_shape(shapes[0], shapes[1], self.times)

    def _probe(self, model: nn.Module, options: ReplayOptions) -> tuple[Engine, Shape]:
        engine = _engine(model, options)
        with engine.running(_ROW_TOKENS, engine.sums, None):
            return engine, engine.shape(engine.sums)

    def rehearse(self, options: ReplayOptions, full: Sizes, profile: Profile, depth: int) -> Rehearsal:
        """Costs of the whole model's visits of these sizes, from shorter ones behind up to `depth` nodes."""
        sizes = full.shortened(has_states=self.shape().state_bytes > 0)
        key = (options, sizes, depth)
        if key not in self._rehearsed:
            found = []
            for probed, _ in self._probed["recompute"]:
                whole = self._walk(probed, options, sizes, profile, depth)
                found.append(whole.with_halves(self._walk(probed, options, sizes.halved(), profile, 1)))
            self._rehearsed[key] = (
                extend_rehearsal(found[0], found[1], self.times) if self.times else found[0]
            )
        return self._rehearsed[key].at_full_size(full)

    def _walk(
        self, probed: Engine, options: ReplayOptions, sizes: Sizes, profile: Profile, depth: int
    ) -> Rehearsal:
        exact = replace(
            options,
            max_node_tokens=sizes.node_tokens,
            max_visit_bytes=None,
            max_visit_tokens=sizes.visit_tokens,
            min_shared_tokens=1,
        )
        engine = _engine(probed.model, exact)
        engine.take_shape_of(probed)
        return rehearse(engine, sizes, profile, depth)


def _engine(model: nn.Module, options: ReplayOptions) -> Engine:
    return Engine(model, create_adapter(model), _NoStore(), options)
