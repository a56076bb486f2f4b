"""In-place changes: autograd's own check is off under hooks, so the hooks must notice."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from offload_steps import (
    EVERYTHING,
    WIDTH,
    Gradients,
    Keep,
    assert_empty,
    batch,
    check_step,
    counting_puts,
    gradients_of,
    small_store,
    tiny_model,
)
from torch import nn

from tiercache.errors import SavedTensorChangedError
from tiercache.runtime import offload

OPTIONS = [EVERYTHING, {"min_bytes": 0}, {"min_bytes": "1GiB"}]


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("through", ["itself", "a view", "a detached alias"])
def test_trap_01_in_place_edit_after_pack_raises(options: dict[str, Any], through: str) -> None:
    with small_store() as store:
        x = batch().requires_grad_()
        with offload(store, **options):
            y = x.exp()
            loss = y.sum()
        target = {"itself": y, "a view": y[0], "a detached alias": y.detach()}[through]
        with torch.no_grad():
            target.add_(1)
        with pytest.raises(SavedTensorChangedError, match="in-place") as caught:
            loss.backward()
        assert isinstance(caught.value, RuntimeError)  # what autograd itself raises


@pytest.mark.parametrize("options", OPTIONS)
def test_trap_01_holds_for_tensors_that_are_passed_through(options: dict[str, Any]) -> None:
    with small_store() as store:
        x, scale = batch(), torch.ones(WIDTH, requires_grad=True)
        with offload(store, **options):
            loss = (x * scale).sum()
        x.add_(1)
        with pytest.raises(SavedTensorChangedError):
            loss.backward()


def test_trap_01_an_edit_before_the_move_is_remembered_after_it() -> None:
    with small_store() as store:
        x = batch().requires_grad_()
        with offload(store, **EVERYTHING):
            y = x.exp()
            loss = y.sum()
            with torch.no_grad():
                y.add_(1)
            del y
        assert store.stats().pages == 1
        with pytest.raises(SavedTensorChangedError):
            loss.backward()
        del loss
        assert_empty(store)


def test_trap_01_an_edit_that_autograd_allows_is_allowed() -> None:
    def step(context: Any) -> Gradients:
        model, x = tiny_model(), batch()
        with context:
            hidden = nn.functional.relu_(model(x) + 0.0)  # saves its own output after the edit
            loss = hidden.sum()
        loss.backward()
        return gradients_of(model)

    with small_store() as store:
        check_step(step, store)


@pytest.mark.parametrize("options", OPTIONS)
def test_trap_02_weight_changed_between_forward_and_backward_raises(options: dict[str, Any]) -> None:
    with small_store() as store:
        model = tiny_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with offload(store, **options):
            first, second = model(batch()).sum(), model(batch(2)).sum()
        first.backward()
        optimizer.step()
        with pytest.raises(SavedTensorChangedError):
            second.backward()


def test_trap_03_what_somebody_can_still_edit_is_never_in_flight() -> None:
    """Bytes in flight equal those of the packing, for nobody but the graph can reach them."""
    held: list[torch.Tensor] = []
    in_flight: list[int] = []

    def step(context: Any) -> Gradients:
        model, x = tiny_model(1), batch().requires_grad_()
        with context:
            for _ in range(4):
                x = (x + 1).tanh()
                held.append(x.detach())
            loss = model(x).sum()
        held[0].data.add_(1)  # no version tells of this edit; plain autograd computes with the new bytes
        held.clear()
        loss.backward()
        return gradients_of(model)

    with small_store() as store:
        put = store.put

        def editing_put(key: Any, tensor: torch.Tensor, *, own: bool = False) -> bool:
            pointer = tensor.untyped_storage().data_ptr()
            in_flight.append(pointer)
            assert all(pointer != other.untyped_storage().data_ptr() for other in held)
            return put(key, tensor, own=own)

        store.put = editing_put  # type: ignore[method-assign]
        check_step(step, store, keep_last_bytes=0)
        assert in_flight


def test_trap_03_a_numpy_view_keeps_a_storage_here() -> None:
    with small_store() as store, counting_puts(store) as sizes:
        x = batch().requires_grad_()
        with offload(store, **EVERYTHING):
            y = x.exp()
            loss, outside = y.sum(), y.detach().numpy()
            del y
        assert sizes == []
        expected = x.detach().exp()
        loss.backward()
        assert torch.equal(x.grad, expected)
        assert outside.shape == (2, 16, 64)


def test_trap_06_reading_a_saved_tensor_first() -> None:
    with small_store() as store:
        x = batch().requires_grad_()
        with offload(store, **EVERYTHING):
            y = x.exp()
            loss = y.sum()
        node, expected = y.grad_fn, x.detach().exp()
        del y
        for _ in range(3):
            assert torch.equal(node._saved_result, expected)  # type: ignore[union-attr]
        loss.backward()
        assert torch.equal(x.grad, expected)  # type: ignore[arg-type]
        del node, loss
        assert_empty(store)


def test_trap_12_pointer_reuse_after_free_is_no_duplicate() -> None:
    """The same address, again and again, with other bytes each time."""
    found: list[list[torch.Tensor]] = []
    with small_store() as store:
        x, pointers = torch.ones(1, requires_grad=True), set()
        with offload(store, **EVERYTHING):
            for number in range(12):

                def make(number: int = number) -> list[torch.Tensor]:
                    tensor = (
                        torch.arange(1 << 16) % (number + 2) == 0
                    )  # moved as bits, so its memory is freed
                    pointers.add(tensor.data_ptr())
                    return [tensor]

                x = Keep.apply(x, make, found)
        x.backward()
        for number, (tensor,) in zip(reversed(range(12)), found, strict=True):
            assert torch.equal(tensor, torch.arange(1 << 16) % (number + 2) == 0)
        assert len(pointers) < 12, "no address was used twice: this proves nothing"


def test_trap_21_a_returned_saved_tensor_stays_intact_as_gradient() -> None:
    class Scale(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            factor = x.detach() * 3
            ctx.save_for_backward(factor)
            return (x * factor).sum()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            return ctx.saved_tensors[0]

    def step(context: Any) -> Gradients:
        x = batch().requires_grad_()
        with context:
            loss = Scale.apply(x)
        loss.backward(retain_graph=True)
        first = x.grad
        x.grad = None
        for seed in range(5):  # pages and buffers come and go meanwhile
            with context:
                tiny_model(1)(batch(seed)).sum().backward()
        loss.backward()
        return [first, x.grad]

    with small_store() as store:
        check_step(step, store, keep_last_bytes=0)


def test_trap_21_an_edit_of_such_a_gradient_is_noticed() -> None:
    with small_store() as store:
        x = batch().requires_grad_()

        class Return(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
                ctx.save_for_backward(x.detach() * 3)
                return x.sum()

            @staticmethod
            def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
                return ctx.saved_tensors[0]

        with offload(store, **EVERYTHING):
            loss = Return.apply(x)
        (gradient,) = torch.autograd.grad(loss, x, retain_graph=True)
        expected = gradient.clone()
        shares = gradient.add_(1)
        try:
            (again,) = torch.autograd.grad(loss, x)
        except SavedTensorChangedError:
            return
        assert torch.equal(again, expected), "the edit reached the saved bytes, and nobody said so"
        assert shares is gradient


def test_the_reference_without_hooks_raises_where_we_do() -> None:
    x = batch().requires_grad_()
    with nullcontext():
        y = x.exp()
        loss = y.sum()
    with torch.no_grad():
        y.add_(1)
    with pytest.raises(RuntimeError):
        loss.backward()
