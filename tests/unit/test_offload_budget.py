"""What moves and when: first saved first, never with room to spare, and flat over many steps."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from offload_steps import (
    ACTIVATION_BYTES,
    Keep,
    assert_empty,
    batch,
    check_step,
    counting_puts,
    gradients_of,
    small_store,
    step_forward,
    tiny_model,
)

from tiercache.runtime import offload

KIB = 1024


def chain(length: int, found: list[Any]) -> torch.Tensor:
    """A graph that saves `length` tensors of 4 KiB, one after the other, each its own number."""
    x = torch.ones(1, requires_grad=True)
    for number in range(length):
        x = Keep.apply(x, lambda number=number: [torch.full((KIB,), float(number))], found)
    return x


def numbers_put(store: Any) -> list[int]:
    """Collects the order of packing of every page that is put from now on."""
    numbers: list[int] = []
    put = store.put

    def note(key: Any, tensor: torch.Tensor, *, own: bool = False) -> bool:
        numbers.append(key.layer)
        return put(key, tensor, own=own)

    store.put = note
    return numbers


@pytest.mark.parametrize(
    ("device", "host"), [("1KiB", "64MiB"), ("5KiB", "64MiB"), (1, "64MiB"), ("1KiB", None)]
)
def test_trap_27_a_budget_below_the_largest_tensor(device: Any, host: Any, tmp_path: Any) -> None:
    with small_store(tmp_path, device=device, host=host) as store:
        check_step(step_forward, store)
        check_step(step_forward, store, keep_last_bytes=0)
        assert store.stats().bytes_peak["device"] <= store.config.device_bytes


def test_trap_27_nothing_has_room() -> None:
    from tiercache.errors import TierFullError

    with small_store(device="1KiB", host="8KiB") as store:
        with pytest.raises(TierFullError), offload(store, min_bytes=0):
            tiny_model()(batch())
        assert_empty(store)


def test_trap_28_alternating_shapes_leave_memory_flat() -> None:
    with small_store(device="16KiB") as store:
        context, model = offload(store, min_bytes=0), tiny_model(1)
        counts = []
        for number in range(200):
            with context:
                loss = model(batch(number, rows=4 + number % 5 * 3)).square().sum()
            loss.backward()
            gradients_of(model)
            del loss
            if number % 50 == 49:
                assert_empty(store)
                counts.append(sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects()))
                assert len(store._books.by_id) < 100
        assert max(counts[1:]) <= counts[0] + 2, counts


def test_trap_30_what_was_saved_last_is_never_written_when_there_is_room() -> None:
    found: list[Any] = []
    with small_store(device="64KiB") as store:
        numbers = numbers_put(store)
        with offload(store, min_bytes=0):
            y = chain(32, found)
        assert numbers == list(range(len(numbers))), "not in the order of saving"
        # 48 KiB stay: 12 storages of 4 KiB.
        assert max(numbers) == 32 - 12 - 1
        y.backward()
        assert numbers == list(range(20)), "backward moved something"
        assert [int(tensor[0]) for (tensor,) in found] == list(reversed(range(32)))


@pytest.mark.parametrize("length", [1, 15, 16])
def test_trap_30_a_graph_that_fits_is_not_touched(length: int) -> None:
    with small_store(device="64KiB") as store, counting_puts(store) as sizes:
        with offload(store, min_bytes=0):
            y = chain(length, [])
        assert store.stats().bytes_used["device"] == length * 4 * KIB
        assert sizes == []
        y.backward()
        del y
        assert_empty(store)


def test_an_explicit_limit_is_kept() -> None:
    with small_store(device="64KiB") as store:
        numbers = numbers_put(store)
        with offload(store, min_bytes=0, keep_last_bytes="20KiB") as context:
            y = chain(16, [])
        assert numbers == list(range(11))
        assert context.last_session.window.used_bytes == 20 * KIB
        y.backward()


def test_one_budget_holds_for_resident_storages_and_pages_together() -> None:
    with small_store(device="64KiB") as store:
        with offload(store, min_bytes=0) as context:
            y = chain(64, [])
        y.backward()
        session = context.last_session
        assert session.loan.overshoot_bytes == 0
        assert store.stats().bytes_peak["device"] <= 64 * KIB
        assert session.window.used_bytes == session.loan.lent_bytes == 0


def test_pages_come_up_before_they_are_asked_for(tmp_path: Any) -> None:
    with small_store(tmp_path, device="256KiB", host="256KiB") as store:
        with offload(store, min_bytes=0):
            y = chain(512, [])
        store.flush()
        y.backward()
        store.flush()
        assert store.stats().prefetches > 0


@pytest.mark.parametrize("learned", [False, True])
def test_prefetching_follows_the_order_that_was_observed(learned: bool) -> None:
    """Backward in the order of packing: the guess is wrong once, then turned, or learned from the step before."""
    with small_store(device="64KiB") as store:
        context = offload(store, min_bytes=0, keep_last_bytes=0)
        for _ in range(1 + learned):
            asked: list[list[int]] = []
            prefetch = type(store).prefetch

            def note(keys: Any, asked: Any = asked, prefetch: Any = prefetch) -> None:
                asked.append([key.layer for key in keys])
                prefetch(store, keys)

            with context:
                parts = [chain(1, []) for _ in range(40)]
            store.prefetch = note  # type: ignore[method-assign]
            for part in parts:
                part.backward()
            del store.prefetch
        flat = [number for keys in asked for number in keys]
        assert flat == sorted(flat)
        assert set(range(4, 40)) <= set(flat)


def test_what_the_caller_keeps_is_moved_once_it_lets_go() -> None:
    with small_store() as store, counting_puts(store) as sizes:
        x = batch().requires_grad_()
        with offload(store, min_bytes=0, keep_last_bytes=0) as context:
            hidden = x.tanh()
            loss = hidden.sum()
        assert sizes == []
        del hidden
        context.last_session.make_room(look_at_all=True)
        assert sizes == [2 * ACTIVATION_BYTES]
        loss.backward()
