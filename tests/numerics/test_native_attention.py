"""The processor's own bf16 attention against the plain form in fp64, and what it leaves to other operators."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from tiercache.runtime import _attention, native_attention
from tiercache.runtime.kernels import MASKED, Block, block_backward, block_forward

needs_instructions = pytest.mark.skipif(not _attention.available(), reason="no AVX512-BF16")


@pytest.fixture(
    autouse=True,
    params=[
        "avx512",
        pytest.param("amx", marks=pytest.mark.skipif(not _attention.amx_available(), reason="no AMX")),
    ],
)
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Every test on each instruction set that the processor has."""
    monkeypatch.setattr(native_attention, "_amx", lambda: request.param == "amx")
    return request.param


# bf16 keeps 8 bits: weights and their gradients are rounded to 2^-9 before their products, as torch's operator does
ROUNDING = 2.0**-8

# heads, key-value heads, queries, keys, width of keys, width of values
SIZES = [
    (9, 3, 200, 200, 64, 64),
    (4, 4, 1, 1, 64, 128),
    (8, 2, 129, 257, 128, 64),
    (2, 1, 333, 333, 128, 128),
    (3, 3, 47, 1000, 64, 64),
    (6, 2, 128, 128, 192, 128),
    (5, 1, 63, 65, 64, 64),
]


def tensors(sizes: tuple[int, ...], seed: int = 0) -> list[torch.Tensor]:
    """q, k, v and the gradient of the output, in bf16, as a projection's transposed views."""
    heads, kv_heads, queries, keys, key_width, value_width = sizes
    generator = torch.Generator().manual_seed(seed)
    shapes = [(queries, heads, key_width), (keys, kv_heads, key_width), (keys, kv_heads, value_width)]
    shapes.append((queries, heads, value_width))
    return [torch.randn(1, *s, generator=generator).bfloat16().transpose(1, 2) for s in shapes]


def distance(got: torch.Tensor, want: torch.Tensor) -> float:
    """Of two tensors, relative to the norm of the second."""
    assert got.shape == want.shape
    return float((got.double() - want).norm() / want.norm().clamp_min(1e-30))


@needs_instructions
@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize(
    ("sizes", "causal"), [(s, c) for s, c in product(SIZES, (True, False)) if not c or s[2] == s[3]]
)
def test_a_block_is_that_of_the_plain_form(sizes: tuple[int, ...], causal: bool, threads: int) -> None:
    q, k, v, grad = tensors(sizes)
    block = Block(0.3, causal=causal)
    assert native_attention.serves(q, v.shape[-1], block)
    wide = [x.double() for x in (q, k, v)]
    want_out, want_lse = block_forward(*wide, block)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        out, lse = block_forward(q, k, v, block)
        rounded = want_out.bfloat16()
        gradients = block_backward(grad, q, k, v, rounded, want_lse.float(), block)
    finally:
        torch.set_num_threads(before)
    assert (out.dtype, lse.dtype) == (torch.float32, torch.float32)
    assert distance(out, want_out) < ROUNDING
    assert distance(lse, want_lse) < 1e-6
    want = block_backward(grad.double(), *wide, rounded.double(), want_lse, block)
    for got, exact in zip(gradients, want, strict=True):
        if float(exact.norm()) > 1e-6:  # a query that sees one key has no gradient in its scores
            assert distance(got, exact) < ROUNDING


@needs_instructions
def test_it_is_as_near_to_fp64_as_torchs_operator() -> None:
    q, k, v, grad = tensors((9, 3, 300, 300, 64, 64))
    block, wide = Block(0.125, causal=True), [x.double() for x in (q, k, v)]
    operator = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    theirs, their_lse = operator(q, k, v, 0.0, True, scale=0.125)  # noqa: FBT003
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    want_out, want_lse = block_forward(*wide, block)
    want = block_backward(grad.double(), *wide, want_out, want_lse, block)
    out, lse = block_forward(q, k, v, block)
    ours = block_backward(grad, q, k, v, out.bfloat16(), lse, block)
    other = backward(grad, q, k, v, theirs, their_lse, 0.0, True, scale=0.125)  # noqa: FBT003
    for mine, torchs, exact in zip((out, *ours), (theirs, *other), (want_out, *want), strict=True):
        assert distance(mine, exact) <= 1.02 * distance(torchs, exact)


@needs_instructions
def test_parts_of_a_softmax_add_up_to_the_whole() -> None:
    q, k, v, grad = tensors((6, 2, 96, 320, 64, 64))
    block = Block(0.2)
    whole, lse = block_forward(q, k, v, block)
    parts = [block_forward(q, k[:, :, a:b], v[:, :, a:b], block) for a, b in ((0, 100), (100, 320))]
    merged = sum(out * torch.exp(part_lse - lse)[..., None] for out, part_lse in parts)
    assert distance(merged, whole.double()) < ROUNDING
    gradients = block_backward(grad, q, k, v, whole.bfloat16(), lse, block)
    halves = [
        block_backward(grad, q, k[:, :, a:b], v[:, :, a:b], whole.bfloat16(), lse, block)
        for a, b in ((0, 100), (100, 320))
    ]
    assert distance(halves[0][0] + halves[1][0], gradients[0].double()) < 1e-5
    for i in (1, 2):
        assert distance(torch.cat([half[i] for half in halves], 2), gradients[i].double()) < 1e-5


@needs_instructions
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_the_same_call_gives_the_same_bits(threads: int) -> None:
    q, k, v, grad = tensors((4, 2, 260, 260, 64, 64))
    block, before = Block(0.125, causal=True), torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        first, again = ([*block_forward(q, k, v, block)] for _ in range(2))
        for results in (first, again):
            results += block_backward(grad, q, k, v, first[0], first[1], block)
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@needs_instructions
def test_a_forwards_rows_do_not_depend_on_the_threads() -> None:
    q, k, v, _ = tensors((4, 2, 260, 260, 64, 64))
    before, results = torch.get_num_threads(), []
    for threads in (1, 2, 4):
        torch.set_num_threads(threads)
        results.append(block_forward(q, k, v, Block(0.125, causal=True)))
    torch.set_num_threads(before)
    assert all(torch.equal(a, b) for got in results[1:] for a, b in zip(got, results[0], strict=True))


@needs_instructions
@pytest.mark.parametrize("view", ["odd row stride", "sliced width", "transposed width", "expanded heads"])
def test_any_strides(view: str) -> None:
    q, k, v, grad = tensors((4, 4, 70, 90, 64, 64))

    def strided(x: torch.Tensor) -> torch.Tensor:
        _, heads, rows, width = x.shape
        if view == "odd row stride":
            storage = torch.zeros(heads, rows, width + 3, dtype=x.dtype)[None]
            return storage[..., 1 : width + 1].copy_(x)
        if view == "sliced width":
            return torch.cat([x, x], -1)[..., :width]
        if view == "transposed width":
            return x.transpose(-1, -2).contiguous().transpose(-1, -2)
        return x[:, :1].expand(-1, heads, -1, -1)

    views = [strided(x) for x in (q, k, v, grad)]
    copies = [x.contiguous() for x in views]
    block = Block(0.125)
    (out, lse), (want, want_lse) = block_forward(*views[:3], block), block_forward(*copies[:3], block)
    assert torch.equal(out, want)
    got = block_backward(views[3], *views[:3], out.bfloat16(), lse, block)
    expected = block_backward(copies[3], *copies[:3], want.bfloat16(), want_lse, block)
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


@needs_instructions
def test_large_scores_neither_overflow_nor_lose_the_largest() -> None:
    q, k, v, grad = tensors((2, 2, 40, 600, 64, 64))
    block, wide = Block(20.0), [x.double() for x in (q, k, v)]
    (out, lse), (want, want_lse) = block_forward(q, k, v, block), block_forward(*wide, block)
    assert distance(out, want) < ROUNDING
    assert distance(lse, want_lse) < 1e-6
    assert all(torch.isfinite(x).all() for x in block_backward(grad, q, k, v, out.bfloat16(), lse, block))


@needs_instructions
@pytest.mark.parametrize("rows", [1, 15, 16, 17, 31, 47, 64, 113])
def test_rows_beyond_the_last_are_neither_read_nor_written(rows: int) -> None:
    """Blocks of every remainder, cut out of tensors that are not numbers everywhere else."""
    whole = [torch.full((1, 2, 130, 64), float("nan"), dtype=torch.bfloat16) for _ in range(4)]
    inner = [x[:, :, 1 : rows + 1] for x in whole]
    for x, values in zip(inner, tensors((2, 2, rows, rows, 64, 64)), strict=True):
        x.copy_(values)
    q, k, v, grad = inner
    block = Block(0.125, causal=True)
    out, lse = block_forward(q, k, v, block)
    results = [out, lse, *block_backward(grad, q, k, v, out.bfloat16(), lse, block)]
    assert all(torch.isfinite(x).all() for x in results)
    assert all(torch.isnan(x[:, :, 0]).all() and torch.isnan(x[:, :, rows + 1 :]).all() for x in whole)


@needs_instructions
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("where", [0, 1, 2])
def test_what_is_not_finite_shows(where: int, value: float) -> None:
    inputs = tensors((2, 2, 40, 40, 64, 64))[:3]
    inputs[where] = inputs[where].clone()
    inputs[where][0, 0, 20, 5] = value
    out, _ = block_forward(*inputs, Block(0.125, causal=True))
    assert not torch.isfinite(out[0, 0, 20:]).all()
    assert torch.isfinite(out[0, 1]).all()
    if where < 2:  # earlier queries give such a value the weight 0, and 0 times it is not a number
        assert torch.isfinite(out[0, 0, :20]).all()


def test_other_blocks_are_left_to_other_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    q, _, v, _ = tensors((2, 2, 8, 8, 64, 64))
    block = Block(0.125)
    refused = [
        native_attention.serves(q.float(), 64, block),
        native_attention.serves(q[..., :32], 64, block),
        native_attention.serves(q, 48, block),
        native_attention.serves(q.expand(2, -1, -1, -1), 64, block),
        native_attention.serves(q, 64, Block(0.125, softcap=30.0)),
        native_attention.serves(q, 64, Block(0.125, bias=torch.full((8, 8), MASKED))),
        native_attention.serves(q.to("meta"), 64, block),
    ]
    assert not any(refused)
    monkeypatch.setattr(native_attention, "_available", lambda: False)
    assert not native_attention.serves(q, v.shape[-1], block)
    out, lse = block_forward(*tensors((2, 2, 8, 8, 64, 64))[:3], block)
    assert (out.dtype, lse.dtype) == (torch.bfloat16, torch.float32)
