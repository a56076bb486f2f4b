"""Models that compute in fp64 throughout, whatever their classes keep in fp32."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import model_zoo
import torch


@contextmanager
def in_fp64() -> Iterator[None]:
    """For a while the names by which modules ask for fp32 (norms, rotary tables, softmax, scans, experts) mean fp64."""
    names = [(torch, "float32"), (torch, "float"), (torch.Tensor, "float")]
    before = [getattr(owner, name) for owner, name in names]
    wide = [torch.float64, torch.float64, torch.Tensor.double]
    default = torch.get_default_dtype()
    _set(names, wide)
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(default)
        _set(names, before)


def _set(names: list[tuple[Any, str]], values: list[Any]) -> None:
    for (owner, name), value in zip(names, values, strict=True):
        setattr(owner, name, value)


def build(name: str, **fields: Any) -> Any:
    """A tiny model in fp64, whose experts run one by one: the grouped product of experts has no fp64."""
    with in_fp64():
        model = model_zoo.build(name, dtype=torch.float64, **fields)
    for module in model.modules():
        if hasattr(module, "config"):
            module.config._experts_implementation = "eager"
    return model
