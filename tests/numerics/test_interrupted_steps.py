"""An exception in the middle of a step: `.grad` is as it was before, and no page is left."""

import dense
import pytest
import torch
import trees
from plain_model import build_plain
from runs import replay_of

from tiercache.runtime import prefix_attention


@pytest.mark.parametrize("fails_at", [0, 1, 5])
def test_an_exception_in_the_middle_of_a_step_leaves_nothing(fails_at):
    model, case = build_plain(prefix_attention), trees.make_case("depth_3")
    before = {n: torch.full_like(p, 3.0) for n, p in model.named_parameters()}
    for name, parameter in model.named_parameters():
        parameter.grad = before[name].clone()
    seen = []

    def failing(logps, row):
        seen.append(row)
        if len(seen) > fails_at:
            raise KeyError("from the user's loss")
        return dense.weighted_sum(logps, row)

    with replay_of(model, case) as replay, pytest.raises(KeyError, match="from the user's loss"):
        replay.backward(case.rows, failing)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.grad, before[name])


@pytest.mark.parametrize("operation", ["put", "read", "accumulate", "take"])
def test_a_store_that_fails_in_the_middle_of_a_step_leaves_nothing(operation):
    model, case = build_plain(prefix_attention), trees.make_case("depth_3")
    for nth in (1, 4, 9):
        with replay_of(model, case) as replay:
            _fail_at(replay.store, operation, nth)
            with pytest.raises(OSError, match="injected"):
                replay.backward(case.rows, dense.weighted_sum)
        assert all(p.grad is None for p in model.parameters())


def _fail_at(store, operation, nth):
    method, calls = getattr(store, operation), []

    def failing(*args, **kwargs):
        calls.append(None)
        if len(calls) == nth:
            raise OSError("injected")
        return method(*args, **kwargs)

    setattr(store, operation, failing)
