"""The context itself: equal gradients, forward only, options and their errors."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from offload_steps import (
    Gradients,
    assert_empty,
    assert_equal,
    batch,
    check_step,
    counting_puts,
    gradients_of,
    small_store,
    step_forward,
    tiny_model,
)

from tiercache.errors import ConfigError
from tiercache.runtime import offload


def step_inside(context: Any) -> Gradients:
    model = tiny_model()
    with context:
        model(batch()).square().sum().backward()
    return gradients_of(model)


@pytest.mark.parametrize("step", [step_inside, step_forward])
@pytest.mark.parametrize("keep_last_bytes", ["auto", 0, "32KiB"])
def test_gradients_are_those_without_hooks(step: Any, keep_last_bytes: Any) -> None:
    with small_store() as store:
        check_step(step, store, keep_last_bytes=keep_last_bytes)


def test_a_budget_that_holds_everything_moves_nothing() -> None:
    with small_store(device="1GiB") as store, counting_puts(store) as sizes:
        check_step(step_inside, store, moves=False)
        assert sizes == []


def test_an_instance_serves_step_after_step() -> None:
    with small_store() as store:
        context = offload(store, min_bytes=0)
        expected = step_forward(nullcontext())
        for _ in range(3):
            torch.manual_seed(0)
            expected = step_forward(nullcontext())
            torch.manual_seed(0)
            assert_equal(step_forward(context), expected)
        assert_empty(store)


def test_small_tensors_are_left_alone() -> None:
    with small_store() as store, counting_puts(store) as sizes:
        with offload(store, min_bytes="1GiB", keep_last_bytes=0):
            tiny_model()(batch()).sum().backward()
        assert sizes == []


@pytest.mark.parametrize(
    "options", [{"keep_last_bytes": "1TiB"}, {"keep_last_bytes": -1}, {"min_bytes": "many"}]
)
def test_wrong_options_are_refused_at_construction(options: dict[str, Any]) -> None:
    with small_store() as store, pytest.raises(ConfigError):
        offload(store, **options)
