"""Graphs of every shape and fate: backward in any order, twice, never, in threads, under checkpointing."""

from __future__ import annotations

import random
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from offload_steps import (
    EVERYTHING,
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
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from tiercache.runtime import offload


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@pytest.mark.parametrize("entries", [1, 2])
def test_trap_04_two_forwards_backward_in_either_order(order: tuple[int, int], entries: int) -> None:
    def step(context: Any) -> Gradients:
        model, losses = tiny_model(), []
        if entries == 1:
            with context:
                losses = [model(batch(seed)).square().sum() for seed in (1, 2)]
        else:
            for seed in (1, 2):
                with context:
                    losses.append(model(batch(seed)).square().sum())
        for index in order:
            losses[index].backward()
        return gradients_of(model)

    with small_store() as store:
        check_step(step, store)


def test_trap_05_retain_graph_and_two_backwards() -> None:
    def step(context: Any) -> Gradients:
        model = tiny_model()
        with context:
            loss = model(batch()).square().sum()
        loss.backward(retain_graph=True)
        first = gradients_of(model)
        loss.backward()
        return [*first, *gradients_of(model)]

    with small_store() as store:
        check_step(step, store)
        check_step(step, store, keep_last_bytes=0)


def test_trap_05_a_retained_graph_stays_within_the_limit() -> None:
    with small_store() as store:
        context = offload(store, min_bytes=0)
        with context:
            loss = tiny_model(6)(batch()).square().sum()
        session = context.last_session
        for _ in range(3):
            loss.backward(retain_graph=True)
            session.make_room(look_at_all=True)
            assert session.window.used_bytes <= 48 * 1024
            assert store.stats().pages > 0


@pytest.mark.parametrize("inside", [True, False])
def test_trap_07_double_backward(inside: bool) -> None:
    def step(context: Any) -> Gradients:
        model, x = tiny_model(2), batch().requires_grad_()
        with context:
            loss = model(x).pow(3).sum()
            if inside:
                (slope,) = torch.autograd.grad(loss, x, create_graph=True)
        if not inside:
            (slope,) = torch.autograd.grad(loss, x, create_graph=True)
        slope.square().sum().backward()
        return [*gradients_of(model), x.grad]

    with small_store() as store:
        check_step(step, store)
        check_step(step, store, keep_last_bytes=0)


def test_trap_07_backward_inside_the_context() -> None:
    def step(context: Any) -> Gradients:
        model = tiny_model()
        with context:
            for seed in range(3):
                model(batch(seed)).square().sum().backward()
        return gradients_of(model)

    with small_store() as store:
        check_step(step, store)


def test_trap_08_partial_backward_and_unused_branches() -> None:
    def step(context: Any) -> Gradients:
        trunk, one, other = tiny_model(1), tiny_model(2), tiny_model(2)
        with context:
            hidden = trunk(batch())
            loss, unused = one(hidden).sum(), other(hidden).sum()
        found = torch.autograd.grad(loss, list(one.parameters()))
        del loss, unused
        return list(found)

    with small_store() as store:
        check_step(step, store)


def test_trap_09_a_dropped_graph_leaves_nothing() -> None:
    with small_store() as store:
        with offload(store, min_bytes=0):
            loss = tiny_model()(batch()).sum()
        assert store.stats().pages > 0
        del loss
        assert_empty(store)


def test_trap_09_an_exception_in_forward_leaves_nothing() -> None:
    class Broken(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise ArithmeticError("forward broke")

    with small_store() as store:
        model = nn.Sequential(*tiny_model(), Broken())
        with pytest.raises(ArithmeticError), offload(store, **EVERYTHING):
            model(batch())
        assert store.stats().puts > 0
        assert_empty(store)
        check_step(step_forward, store)


def test_trap_09_evaluation_with_gradients_on_leaves_nothing() -> None:
    with small_store() as store:
        model = tiny_model().eval()
        with offload(store, min_bytes=0):
            outputs = [model(batch(seed)) for seed in range(3)]
        assert store.stats().puts > 0
        del outputs
        assert_empty(store)


def test_trap_10_detached_outputs_die_without_a_backward() -> None:
    with small_store() as store:
        with offload(store, min_bytes=0):
            kept = [tiny_model()(batch(seed)).detach() for seed in range(3)]
            assert store.stats().puts > 0
            assert_empty(store)
        assert all(tensor.isfinite().all() for tensor in kept)


@pytest.mark.parametrize("seed", range(12))
def test_trap_20_random_graphs_unpacked_in_any_order(seed: int) -> None:
    def step(context: Any) -> Gradients:
        choose = random.Random(seed)
        leaves = [batch(number).requires_grad_() for number in range(3)]
        nodes: list[torch.Tensor] = list(leaves)
        ops = [torch.tanh, torch.exp, torch.sigmoid, torch.sin, lambda t: t.softmax(-1), lambda t: t * 2]
        with context:
            for _ in range(25):
                one, other = choose.choice(nodes), choose.choice(nodes)
                made = choose.choice(ops)(one) if choose.random() < 0.5 else one * other
                nodes.append(made.clamp(-3, 3))
            sums = [node.sum() for node in nodes[3:]]
        del nodes
        choose.shuffle(sums)
        gradients: Gradients = []
        for loss in sums[:6]:
            gradients += torch.autograd.grad(loss, leaves, retain_graph=True, allow_unused=True)
        return [*gradients, torch.ones(1)]

    with small_store(device="16KiB") as store:
        check_step(step, store)


@pytest.mark.parametrize("kind", ["non-reentrant", "reentrant", "selective"])
def test_trap_22_checkpointing(kind: str) -> None:
    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        keep = op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    def run(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        if kind == "selective":
            contexts = lambda: create_selective_checkpoint_contexts(policy)  # noqa: E731
            return checkpoint(layer, x, use_reentrant=False, context_fn=contexts)
        return checkpoint(layer, x, use_reentrant=kind == "reentrant")

    def step(context: Any) -> Gradients:
        model, x = tiny_model(4), batch().requires_grad_()
        with context:
            for layer in model:
                x = run(layer, x)
            loss = x.square().sum()
        loss.backward()
        return gradients_of(model)

    with small_store(device="16KiB") as store:
        check_step(step, store, keep_last_bytes=0)


def test_trap_22_layer_inputs_of_checkpoints_are_what_moves() -> None:
    with small_store() as store, counting_puts(store) as sizes:
        with offload(store, **EVERYTHING):
            x = batch().requires_grad_()
            for layer in tiny_model(4):
                x = checkpoint(layer, x, use_reentrant=False)
            loss = x.sum()
            del x
        assert sizes == [batch().numel() * 4] * len(sizes)
        assert len(sizes) >= 3
        loss.backward()


def test_trap_23_compiled_regions() -> None:
    def step(context: Any) -> Gradients:
        model = tiny_model(2, dropout=0.0)
        compiled = torch.compile(model[0], backend="aot_eager")
        with context:
            loss = model[1](compiled(batch())).square().sum()
        loss.backward()
        return gradients_of(model)

    with small_store() as store:
        check_step(step, store, keep_last_bytes=0)


def test_trap_23_nested_contexts() -> None:
    def step(context: Any) -> Gradients:
        model = tiny_model(3)
        inner = nullcontext() if isinstance(context, nullcontext) else offload(other, **EVERYTHING)
        with context:
            x = model[0](batch())
            with inner:
                x = model[1](x)
            with context:
                x = model[2](x)
            loss = x.square().sum()
        loss.backward()
        return gradients_of(model)

    with small_store() as store, small_store() as other:
        check_step(step, store)
        assert other.stats().puts > 0
        assert_empty(other)


def test_trap_23_threads() -> None:
    """Hooks are a thread's own: each thread enters for itself, and backward may run in another one."""
    with small_store() as store:
        torch.manual_seed(0)
        expected = {seed: step_of(seed, nullcontext()) for seed in range(4)}
        context, found = offload(store, min_bytes=0), {}

        def work(seed: int) -> None:
            found[seed] = step_of(seed, context)

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(work, range(4), timeout=60))
        for seed in range(4):
            assert_equal(found[seed], expected[seed])
        assert store.stats().puts > 0
        assert_empty(store)


def step_of(seed: int, context: Any) -> Gradients:
    with LOCK:  # the weights' seed is the process's
        model = tiny_model(dropout=0.0)
    with context:
        loss = model(batch(seed)).square().sum()
    backward = threading.Thread(target=loss.backward)
    backward.start()
    backward.join(60)
    return gradients_of(model)


LOCK = threading.Lock()


def test_trap_23_one_graph_and_two_threads_of_backward() -> None:
    with small_store() as store:
        x = batch().requires_grad_()
        with offload(store, **EVERYTHING):
            hidden = x
            for _ in range(20):
                hidden = hidden.tanh() * 1.5
            loss = hidden.sum()
            del hidden
        expected = torch.autograd.grad(loss, x, retain_graph=True)[0]
        found: list[torch.Tensor] = []

        def work(_: int) -> None:
            for _ in range(5):
                found.extend(torch.autograd.grad(loss, x, retain_graph=True))

        with ThreadPoolExecutor(2) as pool:
            list(pool.map(work, range(2), timeout=60))
        assert len(found) == 10
        assert all(torch.equal(gradient, expected) for gradient in found)


def test_trap_23_torch_func_refuses_hooks_itself() -> None:
    with small_store() as store, pytest.raises(RuntimeError, match="hooks"), offload(store):
        torch.func.grad(lambda x: x.exp().sum())(torch.ones(3))
