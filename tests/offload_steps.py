"""Steps whose gradients are compared with and without offload, and stores to run them on."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn

import tiercache
from tiercache.runtime import offload
from tiercache.store import TierStore

Gradients = list[torch.Tensor | None]
Step = Callable[[Any], Gradients]

# Options under which all that can be moved is moved.
EVERYTHING = {"min_bytes": 0, "keep_last_bytes": 0}
# Sizes of one tiny activation: 16 rows of 64 fp32 numbers.
ROWS, WIDTH = 16, 64
ACTIVATION_BYTES = ROWS * WIDTH * 4


def small_store(
    folder: Path | None = None, *, device: Any = "64KiB", host: Any = "64MiB", **options: Any
) -> TierStore:
    """A store whose device budget is far below what a step saves."""
    if folder is not None:
        options = {"disk": folder, "disk_capacity": "256MiB", **options}
    return tiercache.open_store(device=device, host=host, **options)


class Block(nn.Module):
    """One layer of a tiny transformer: every kind of op that saves something of its own."""

    def __init__(self, dropout: float = 0.1) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.dropout = dropout

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        weights = (q @ k.transpose(-1, -2)).div(8.0).softmax(-1)
        weights = nn.functional.dropout(weights, self.dropout)
        x = x + self.out(weights @ v)
        return x + self.down(nn.functional.gelu(self.up(x)))


def tiny_model(num_layers: int = 3, *, dropout: float = 0.1) -> nn.Sequential:
    """A model and its fixed weights."""
    torch.manual_seed(0)
    return nn.Sequential(*[Block(dropout) for _ in range(num_layers)])


def batch(seed: int = 1, rows: int = ROWS) -> torch.Tensor:
    """Input of the tiny model."""
    return torch.randn(2, rows, WIDTH, generator=torch.Generator().manual_seed(seed))


def step_forward(context: Any) -> Gradients:
    """A step of the tiny model whose forward alone runs under the context."""
    model = tiny_model()
    with context:
        loss = model(batch()).square().sum()
    loss.backward()
    return gradients_of(model)


def gradients_of(model: nn.Module) -> Gradients:
    """The parameters' gradients, taken away from them."""
    found = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    model.zero_grad(set_to_none=True)
    return found


def assert_equal(found: Gradients, expected: Gradients) -> None:
    """Every gradient bit for bit."""
    assert len(found) == len(expected) > 0
    for one, other in zip(found, expected, strict=True):
        assert (one is None) == (other is None)
        if one is not None and other is not None:
            assert one.stride() == other.stride()
            assert torch.equal(one, other)
    assert any(gradient is not None for gradient in expected)


def check_step(step: Step, store: TierStore, *, moves: bool = True, **options: Any) -> None:
    """Runs `step(context)` without and with offload from the same seed; gradients are equal and nothing is left."""
    torch.manual_seed(7)
    expected = step(nullcontext())
    puts = store.stats().puts
    torch.manual_seed(7)
    found = step(offload(store, min_bytes=0, **options))
    assert_equal(found, expected)
    if moves:
        assert store.stats().puts > puts, "the step moved nothing: it proves nothing"
    assert_empty(store)


def assert_empty(store: TierStore) -> None:
    """No page and no byte is left in any tier, once copies that were under way (of hints, say) have ended."""
    gc.collect()
    store.flush()
    store.check_integrity()
    stats = store.stats()
    assert stats.pages == 0
    assert not any(stats.bytes_used.values()), stats.bytes_used


@contextmanager
def counting_puts(store: TierStore) -> Iterator[list[int]]:
    """Collects the sizes of the pages that are put."""
    sizes: list[int] = []
    put = store.put

    def note(key: Any, tensor: torch.Tensor, *, own: bool = False) -> bool:
        sizes.append(tensor.numel() * tensor.element_size())
        return put(key, tensor, own=own)

    store.put = note  # type: ignore[method-assign]
    try:
        yield sizes
    finally:
        del store.put


class Keep(torch.autograd.Function):
    """Saves the tensors that `make` returns and, in backward, hands what comes back to `found`."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, make: Callable[[], list[torch.Tensor]], found: list[Any]
    ) -> torch.Tensor:
        ctx.save_for_backward(*make())
        ctx.found = found
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        ctx.found.append(list(ctx.saved_tensors))
        return gradient, None, None


def round_trip(
    store: TierStore, make: Callable[[], list[torch.Tensor]], **options: Any
) -> list[torch.Tensor]:
    """What a node gets back of the tensors that it saved, everything moved to the store in between."""
    x = torch.ones(1, requires_grad=True)
    found: list[list[torch.Tensor]] = []
    with offload(store, **{"min_bytes": 0, "keep_last_bytes": 0, **options}):
        y = Keep.apply(x, make, found)
    y.backward()
    return found[0]


def same_tensor(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors agree in everything that a node can see, every bit included."""
    assert one.dtype == other.dtype
    assert one.shape == other.shape
    assert one.stride() == other.stride()
    assert one.device == other.device
    assert (one.is_conj(), one.is_neg()) == (other.is_conj(), other.is_neg())
    plain = [t.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8) for t in (one, other)]
    return torch.equal(*plain)
