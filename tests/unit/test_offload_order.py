"""The guess of which stored storage backward asks for next."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from offload_steps import (
    EVERYTHING,
    assert_empty,
    assert_equal,
    batch,
    gradients_of,
    small_store,
    step_forward,
    tiny_model,
)

from tiercache.errors import TierFullError
from tiercache.runtime import offload
from tiercache.runtime.offloading.order import UnpackOrder
from tiercache.store import TierStore

# Attention saves its projection (3), its output (5) and a sum (4); the linear layer after it saves that output too, so
# backward asks for 5, 3, 5 again, 4.
ASKED = [8, 7, 5, 3, 5, 4, 2, 1]
FIRST_ASKED = [8, 7, 5, 3, 4, 2, 1]


def passed(order: UnpackOrder) -> list[list[int]]:
    """One backward: what was guessed to come, at each storage asked for first."""
    guesses = []
    for sequence in FIRST_ASKED:
        order.add(sequence)
    for at, sequence in enumerate(ASKED):
        order.note(sequence)
        if sequence not in ASKED[:at]:
            order.remove(sequence)
        guesses.append(order.upcoming(sequence, 16))
    return guesses


def test_what_two_operators_ask_for_does_not_break_the_learned_order() -> None:
    first = UnpackOrder()
    passed(first)
    assert first.observed == FIRST_ASKED
    second = UnpackOrder(first.observed)
    assert passed(second)[:4] == [FIRST_ASKED[1:], FIRST_ASKED[2:], FIRST_ASKED[3:], FIRST_ASKED[4:]]


def test_asked_for_again_says_nothing_of_the_direction() -> None:
    order = UnpackOrder()
    for sequence in range(9):
        order.add(sequence)
    for sequence in (8, 7, 8, 7):
        order.note(sequence)
    assert order.upcoming(7, 3) == [6, 5, 4]


def test_a_prefetch_that_fails_strands_nothing(monkeypatch) -> None:
    """Backward ends with the store's error; the page it asked for stays where it was, for the next backward."""

    def fails(*_: object) -> None:
        raise TierFullError("no room")

    torch.manual_seed(7)
    expected = step_forward(nullcontext())
    torch.manual_seed(7)
    with small_store(device="8KiB") as store:
        model = tiny_model()
        with offload(store, **EVERYTHING):
            loss = model(batch()).square().sum()
        with monkeypatch.context() as patch:
            patch.setattr(TierStore, "prefetch", fails)
            with pytest.raises(TierFullError):
                loss.backward(retain_graph=True)
        model.zero_grad(set_to_none=True)
        loss.backward()
        assert_equal(gradients_of(model), expected)
        del loss
        assert_empty(store)
