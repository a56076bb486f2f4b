"""Wrong input to a replay: a named error, `.grad` as it was, and nothing left in the store."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from dense import weighted_sum
from plain_model import build_plain
from torch import Tensor
from trees import make_case

from tiercache import open_store
from tiercache.errors import (
    ConfigError,
    InputError,
    LossError,
    PageMissingError,
    ParameterChangedError,
    StoreClosedError,
    TierFullError,
)
from tiercache.runtime import BranchReplay, Row, prefix_attention


def _held(store: Any) -> int:
    return sum(store.stats().bytes_used.values())


@pytest.fixture
def replay() -> Iterator[BranchReplay]:
    threads = threading.active_count()
    model = build_plain(prefix_attention)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    with open_store("16MiB") as store:
        yield BranchReplay(model, store, min_shared_tokens=1, check_model=False)
        assert _held(store) == 0, "pages were left behind"
        store.check_integrity()
        assert all(torch.equal(p.grad, torch.ones_like(p)) for p in model.parameters()), ".grad was changed"
    assert threading.active_count() == threads, "threads were left behind"


def _row(tokens: list[int], scored: list[int] | None = None, dtype: torch.dtype = torch.int64) -> Row:
    mask = torch.zeros(len(tokens), dtype=torch.bool)
    mask[[len(tokens) - 1] if scored is None else scored] = True
    return Row(torch.tensor(tokens, dtype=dtype), mask)


def _bools(*shape: int) -> Tensor:
    return torch.zeros(*shape, dtype=torch.bool)


GOOD = [1, 2, 3, 4]
BAD_ROWS: dict[str, tuple[list[Row], str]] = {
    "empty batch": ([], "empty batch"),
    "row of length 0": ([_row(GOOD), Row(torch.zeros(0, dtype=torch.int64), _bools(0))], "row 1"),
    "different dtypes": ([_row(GOOD), _row(GOOD, dtype=torch.int32)], "different dtypes"),
    "different devices": (
        [_row(GOOD), Row(torch.ones(4, dtype=torch.int64, device="meta"), _bools(4))],
        "devices",
    ),
    "float tokens": ([Row(torch.rand(4), _bools(4))], "row 0: tokens"),
    "two-dimensional": ([Row(torch.ones(2, 2, dtype=torch.int64), _bools(2, 2))], "row 0: tokens"),
    "scored of the wrong shape": ([Row(torch.tensor(GOOD), _bools(3))], "row 0: scored"),
    "scored of the wrong dtype": ([Row(torch.tensor(GOOD), torch.zeros(4))], "row 0: scored"),
    "scored position 0": ([_row(GOOD, [0])], "first token is scored"),
    "token id too large": ([_row([1, 2, 10_000])], "out of range"),
    "token id negative": ([_row([1, -2, 3])], "out of range"),
}


@pytest.mark.parametrize("name", BAD_ROWS)
def test_rows_that_cannot_be_trained_on(replay: BranchReplay, name: str) -> None:
    rows, message = BAD_ROWS[name]
    with pytest.raises(InputError, match=message):
        replay.backward(rows, lambda logps, row: logps.sum())


def test_row_of_one_token_is_a_row(replay: BranchReplay) -> None:
    """Documented: nothing of it can be scored, and it changes nothing."""
    report = replay.backward([Row(torch.tensor([3]), _bools(1))], lambda logps, row: logps.sum() * 0)
    assert report.num_rows == 1
    assert report.loss == 0


def _batch(**changes: Any) -> dict[str, Any]:
    ids = torch.tensor([[1, 2, 3, 4, 5], [1, 2, 3, 6, 7]])
    mask, scored = torch.ones_like(ids), torch.zeros_like(ids, dtype=torch.bool)
    scored[:, 3:] = True
    return {"input_ids": ids, "attention_mask": mask, "scored": scored} | changes


BAD_BATCHES: dict[str, tuple[dict[str, Any], str]] = {
    "mask with holes": (_batch(attention_mask=torch.tensor([[1, 1, 0, 1, 1], [1] * 5])), "holes"),
    "mask of the wrong shape": (_batch(attention_mask=torch.ones(2, 4)), "attention_mask"),
    "scored of the wrong shape": (_batch(scored=_bools(2, 4)), "scored"),
    "scored of the wrong dtype": (_batch(scored=torch.ones(2, 5)), "scored"),
    "scored on another device": (_batch(scored=_bools(2, 5).to("meta")), "scored"),
    "one-dimensional": (_batch(input_ids=torch.arange(5)), "input_ids"),
    "float ids": (_batch(input_ids=torch.rand(2, 5)), "input_ids"),
    "no rows": (_batch(input_ids=torch.zeros(0, 5, dtype=torch.int64)), "input_ids"),
    "padding scored": (
        _batch(attention_mask=torch.tensor([[1, 1, 1, 1, 0], [1] * 5])),
        "padded position is scored",
    ),
    "all padding": (_batch(attention_mask=torch.tensor([[0] * 5, [1] * 5]), scored=_bools(2, 5)), "row 0"),
}


@pytest.mark.parametrize("name", BAD_BATCHES)
def test_batches_that_cannot_be_trained_on(replay: BranchReplay, name: str) -> None:
    batch, message = BAD_BATCHES[name]
    with pytest.raises(InputError, match=message):
        replay.logprobs(**batch)


BAD_LOSSES: dict[str, tuple[Callable[[Tensor, Any], Any], str]] = {
    "NaN": (lambda logps, row: logps.sum() * float("nan"), "nan"),
    "infinite": (lambda logps, row: logps.sum() / 0, "inf"),
    "not a scalar": (lambda logps, row: logps, "shape"),
    "a float": (lambda logps, row: 1.0, "float"),
    "None": (lambda logps, row: None, "NoneType"),
    "infinite gradient": (lambda logps, row: (logps - logps.detach()).sqrt().sum(), "gradient"),
}


@pytest.mark.parametrize("name", BAD_LOSSES)
def test_losses_that_are_none(replay: BranchReplay, name: str) -> None:
    loss_fn, message = BAD_LOSSES[name]
    with pytest.raises(LossError, match=message):
        replay.backward(make_case("one_level").rows, loss_fn)


@pytest.mark.parametrize("call", [0, 1, 3])
def test_exception_inside_loss_fn(replay: BranchReplay, call: int) -> None:
    calls: list[Any] = []

    def loss_fn(logps: Tensor, row: Any) -> Tensor:
        calls.append(row)
        if len(calls) > call:
            raise KeyError("advantage")
        return logps.sum()

    with pytest.raises(KeyError, match="advantage"):
        replay.backward(make_case("depth_3").rows, loss_fn)


def test_steps_go_on_after_an_exception(replay: BranchReplay) -> None:
    with pytest.raises(LossError):
        replay.backward(make_case("depth_3").rows, lambda logps, row: logps)
    before = replay.logprobs(**_batch()).detach()
    fresh = BranchReplay(replay.model, replay.store, min_shared_tokens=1, check_model=False)
    assert torch.equal(before, fresh.logprobs(**_batch()).detach())


def test_budget_smaller_than_a_page() -> None:
    model = build_plain(prefix_attention)
    with open_store(128) as store:
        replay = BranchReplay(model, store, min_shared_tokens=1, check_model=False)
        with pytest.raises(TierFullError) as caught:
            replay.backward(make_case("one_level").rows, weighted_sum)
        assert "128" in str(caught.value)
        assert caught.value.remedy
        assert _held(store) == 0


def test_closed_store() -> None:
    store = open_store("1MiB")
    replay = BranchReplay(build_plain(prefix_attention), store, check_model=False)
    store.close()
    with pytest.raises(StoreClosedError):
        replay.backward(make_case("one_level").rows, weighted_sum)


def test_parameter_changed_between_forward_and_backward(replay: BranchReplay) -> None:
    loss = replay.logprobs(**_batch()).sum()
    with torch.no_grad():
        replay.model.layers[1].out.weight.add_(0)
    with pytest.raises(ParameterChangedError, match=r"layers\.1\.out\.weight"):
        loss.backward()


@pytest.mark.parametrize("activations", ["layer_inputs", "recompute", "all"])
def test_parameter_changed_between_capture_and_pop(replay: BranchReplay, activations: str) -> None:
    replay = BranchReplay(
        replay.model, replay.store, min_shared_tokens=1, check_model=False, prefix_activations=activations
    )
    weight = replay.model.norm.bias

    def loss_fn(logps: Tensor, row: Any) -> Tensor:
        with torch.no_grad():
            weight.add_(0)
        return logps.sum()

    with pytest.raises(ParameterChangedError, match=r"norm\.bias"):
        replay.backward(make_case("one_level").rows, loss_fn)


def test_backward_twice(replay: BranchReplay) -> None:
    logps = replay.logprobs(**_batch())
    weights = list(replay.model.parameters())
    torch.autograd.grad(logps.sum(), weights, retain_graph=True)
    with pytest.raises(PageMissingError, match="second time"):
        torch.autograd.grad(logps.sum(), weights)


def test_dropped_logprobs_leave_nothing(replay: BranchReplay) -> None:
    logps = replay.logprobs(**_batch())
    assert _held(replay.store) > 0
    del logps
    assert _held(replay.store) == 0


def test_logprobs_without_gradient_leave_nothing(replay: BranchReplay) -> None:
    with torch.no_grad():
        logps = replay.logprobs(**_batch())
    assert not logps.requires_grad
    assert _held(replay.store) == 0


BAD_OPTIONS: list[dict[str, Any]] = [
    {"prefix_gradient": "detach"},
    {"prefix_gradient": -1},
    {"prefix_gradient": True},
    {"prefix_activations": "none"},
    {"profile": "profile.json"},
    {"profile": "/no/such/profile.json", "prefix_activations": "auto"},
    {"max_node_tokens": 0},
    {"max_visit_tokens": -3},
    {"min_shared_tokens": 1.5},
    {"max_visit_tokens": 8, "max_visit_bytes": 8},
]


@pytest.mark.parametrize("options", BAD_OPTIONS, ids=str)
def test_options_that_cannot_be_meant(replay: BranchReplay, options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        BranchReplay(replay.model, replay.store, **options)


def test_model_without_trainable_parameters(replay: BranchReplay) -> None:
    with pytest.raises(ConfigError, match="no trainable"):
        BranchReplay(build_plain(prefix_attention).requires_grad_(requires_grad=False), replay.store)
