"""Tensors of every kind come back as they were, and what must not move does not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import pytest
import torch
from offload_steps import (
    ACTIVATION_BYTES,
    EVERYTHING,
    Keep,
    assert_empty,
    batch,
    check_step,
    counting_puts,
    gradients_of,
    round_trip,
    same_tensor,
    small_store,
    tiny_model,
)
from torch import nn

from tiercache.runtime import offload
from tiercache.runtime.offloading.payload import (
    pack_bits,
    pack_bits_on_device,
    unpack_bits,
    unpack_bits_on_device,
)


def seeded(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3)).to(dtype)


def check_round_trip(make: Callable[[], list[torch.Tensor]], expected_puts: int | None = None) -> list[int]:
    with small_store() as store, counting_puts(store) as sizes:
        found = round_trip(store, make)
        for one, other in zip(found, make(), strict=True):
            assert same_tensor(one, other)
        if expected_puts is not None:
            assert len(sizes) == expected_puts
        del found
        assert_empty(store)
    return sizes


def test_trap_11_many_views_of_one_storage_move_once() -> None:
    def make() -> list[torch.Tensor]:
        x = seeded(64, 64)
        return [x, x.T, x[3:9], x[:, 5:], x[8:].T, x.view(32, 128), x.view(torch.int32), x[2:4, 1:60:3]]

    assert check_round_trip(make) == [64 * 64 * 4]


def test_trap_11_conjugate_and_plain_are_different_views() -> None:
    def make() -> list[torch.Tensor]:
        x = torch.view_as_complex(seeded(32, 32, 2))
        return [x, x.conj(), x.imag, x.conj().imag, x.real]

    assert check_round_trip(make) == [32 * 32 * 8]


def test_trap_13_a_stride_of_zero_moves_the_storages_bytes() -> None:
    assert check_round_trip(lambda: [seeded(64).expand(1000, 64)]) == [64 * 4]


def test_trap_14_a_small_slice_of_a_huge_base_moves_the_slice() -> None:
    sizes = check_round_trip(lambda: [seeded(1 << 16)[5000:5100]])
    assert len(sizes) == 1
    assert sizes[0] <= 400 + 32


@pytest.mark.parametrize(
    "make",
    [
        lambda: seeded(4, 8, 6, 6).to(memory_format=torch.channels_last),
        lambda: seeded(2, 4, 5, 6, 3).to(memory_format=torch.channels_last_3d),
        lambda: seeded(30, 40).T,
        lambda: seeded(30, 40)[::2, 1::3],
        lambda: seeded(6, 7, 8).permute(2, 0, 1),
        lambda: seeded(100).unfold(0, 10, 3),
        lambda: torch.empty_strided((8, 8), (16, 2)).copy_(seeded(8, 8)),
    ],
)
def test_trap_15_strides_come_back(make: Callable[[], torch.Tensor]) -> None:
    check_round_trip(lambda: [make()], 1)


def test_trap_16_conjugate_and_negative_bits() -> None:
    def make() -> list[torch.Tensor]:
        return [
            torch.view_as_complex(seeded(40, 2)).conj(),
            torch.view_as_complex(seeded(40, 2)).conj().imag,
            torch._neg_view(seeded(40)),
        ]

    assert [tensor.is_neg() for tensor in make()] == [False, True, True]
    check_round_trip(make, 3)


DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16,
    torch.float32, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2, torch.complex64, torch.complex128,
    torch.uint16, torch.uint32, torch.uint64, torch.complex32,
]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [1, 7, 8, 1000])
def test_trap_17_every_dtype(dtype: torch.dtype, size: int) -> None:
    """Any bit pattern, NaN payloads included."""

    def make() -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(5)
        data = torch.randint(0, 256, (size * dtype.itemsize,), dtype=torch.uint8, generator=generator)
        return [(data % 2).bool() if dtype == torch.bool else data.view(dtype)]

    with small_store() as store, counting_puts(store) as sizes:
        (found,) = round_trip(store, make)
        assert found.dtype == dtype
        assert torch.equal(found.view(torch.uint8), make()[0].view(torch.uint8))
        assert len(sizes) == 1


def test_trap_17_zero_size_and_zero_dimensional_tensors() -> None:
    make = lambda: [torch.empty(0, 5), torch.tensor(3.5), torch.empty(4, 0, 2, dtype=torch.int8)]  # noqa: E731
    check_round_trip(make, 1)


def test_bool_tensors_are_packed_to_bits() -> None:
    assert check_round_trip(lambda: [seeded(64, 125) > 0]) == [64 * 125 // 8]


@pytest.mark.parametrize("size", [1, 8, 1003])
def test_bits_are_the_same_on_every_device(size: int) -> None:
    flat = (seeded(size) > 0).view(torch.uint8)
    page = pack_bits(flat)
    assert torch.equal(pack_bits_on_device(flat), page)
    assert torch.equal(unpack_bits_on_device(page, size), flat)
    assert torch.equal(unpack_bits(page, size), flat)


def test_integer_tensors_are_compressed_where_it_pays() -> None:
    (small,) = check_round_trip(lambda: [torch.arange(1 << 16) // 100])
    assert small < (1 << 19) // 4
    random = lambda: [torch.randint(-(2**62), 2**62, (1 << 16,), generator=torch.Generator().manual_seed(1))]  # noqa: E731
    assert check_round_trip(random) == [1 << 19]


def test_trap_18_what_cannot_be_moved_passes_through() -> None:
    fp = seeded(8, 8)

    def make() -> list[torch.Tensor]:
        return [
            fp.to_sparse(),
            fp.to_sparse_csr(),
            torch.quantize_per_tensor(fp, 0.1, 0, torch.qint8),
            torch.nested.nested_tensor([fp[0], fp[1, :3]]),
            torch.nested.nested_tensor([fp[0], fp[1, :3]], layout=torch.jagged),
            torch.empty(3, device="meta"),
            Tagged(fp),
        ]

    import warnings

    with small_store() as store, counting_puts(store) as sizes, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch, on layouts in beta
        found = round_trip(store, make)
        assert sizes == []
        for one, other in zip(found, make(), strict=True):
            assert type(one) is type(other)
            assert (one.layout, one.device, one.dtype) == (other.layout, other.device, other.dtype)
        assert torch.equal(found[0].to_dense(), fp)
        assert torch.equal(found[2].dequantize(), make()[2].dequantize())
        assert torch.equal(found[6].as_subclass(torch.Tensor), fp)


class Tagged(torch.Tensor):
    """A subclass, which may carry more than its bytes."""

    @staticmethod
    def __new__(cls, data: torch.Tensor) -> Self:
        return data.as_subclass(cls)


def test_trap_18_fake_tensors_pass_through() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with small_store() as store, counting_puts(store) as sizes:
        with FakeTensorMode(), offload(store, **EVERYTHING):
            x = torch.empty(8, 8, requires_grad=True)
            x.exp().sum().backward()
            assert x.grad is not None
        assert sizes == []


def test_trap_18_distributed_tensors_pass_through() -> None:
    from torch.distributed import destroy_process_group, init_process_group
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, distribute_tensor
    from torch.testing._internal.distributed.fake_pg import FakeStore

    init_process_group("fake", rank=0, world_size=1, store=FakeStore())
    try:
        mesh = init_device_mesh("cpu", (1,))
        with small_store() as store:
            x = distribute_tensor(seeded(8, 8), mesh, [Replicate()]).requires_grad_()
            with offload(store, **EVERYTHING):
                loss = x.exp().sum()
            loss.backward()
            expected = seeded(8, 8).exp()
            assert torch.equal(x.grad.to_local(), expected)  # type: ignore[union-attr]
    finally:
        destroy_process_group()


def test_trap_19_weights_buffers_and_tied_weights_never_move() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(32, 64)
            self.conv = nn.Conv1d(64, 64, 3, padding=1)
            self.norm = nn.BatchNorm1d(64)
            self.frozen = nn.Linear(64, 64).requires_grad_(requires_grad=False)
            self.register_buffer("scale", seeded(64, 64))

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            x = self.conv(self.embed(tokens).mT)
            x = self.norm(x).mT @ self.scale
            x = nn.functional.linear(self.frozen(x), self.frozen.weight.detach())
            return x @ self.embed.weight.t()  # tied

    torch.manual_seed(0)
    model, tokens = Net(), torch.arange(32).view(2, 16)
    owned = {t.untyped_storage().data_ptr() for t in [*model.parameters(), *model.buffers(), tokens]}
    with small_store() as store:
        moved: list[int] = []
        put = store.put

        def noting_put(key: Any, tensor: torch.Tensor, *, own: bool = False) -> bool:
            moved.append(tensor.untyped_storage().data_ptr())
            return put(key, tensor, own=own)

        store.put = noting_put  # type: ignore[method-assign]
        with offload(store, **EVERYTHING):
            loss = model(tokens).square().sum()
        assert moved
        assert not owned & set(moved)
        loss.backward()
        del loss
        assert all(g is None or g.isfinite().all() for g in gradients_of(model))


def test_trap_19_a_model_of_nothing_but_weights_moves_zero_bytes() -> None:
    with small_store() as store, counting_puts(store) as sizes:
        layers, x = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(3)), batch()
        with offload(store, **EVERYTHING):
            loss = sum(layer(x).sum() for layer in layers)
        assert sizes == []
        loss.backward()


def test_trap_29_the_device_of_each_tensor_is_preserved() -> None:
    devices = ["cpu", "meta"] + (["cuda"] if torch.cuda.is_available() else [])

    def make() -> list[torch.Tensor]:
        return [torch.ones(300, device=device) for device in devices]

    with small_store() as store:
        assert [tensor.device.type for tensor in round_trip(store, make)] == devices


@pytest.mark.gpu
def test_trap_29_a_model_on_an_accelerator() -> None:
    def step(context: Any) -> Any:
        model, x = tiny_model(4).cuda(), batch().cuda()
        with context:
            loss = model(x).square().sum()
        loss.backward()
        return gradients_of(model)

    with small_store() as store:
        check_step(step, store)
        check_step(step, store, keep_last_bytes=0)


def test_a_storage_seen_as_two_dtypes_moves_once() -> None:
    assert check_round_trip(lambda: two_dtypes(seeded(100))) == [400]


def two_dtypes(x: torch.Tensor) -> list[torch.Tensor]:
    return [x, x.view(torch.uint8)]


def test_what_two_nodes_saved_moves_once() -> None:
    with small_store() as store, counting_puts(store) as sizes:
        x = batch().requires_grad_()
        with offload(store, **EVERYTHING):
            hidden = x.tanh()
            loss = (hidden * hidden).sum() + hidden.exp().sum()
            del hidden
        assert sizes == [2 * ACTIVATION_BYTES] * 2
        loss.backward()


def test_the_helper_can_fail() -> None:
    found: list[Any] = []
    x = torch.ones(1, requires_grad=True)
    Keep.apply(x, lambda: [seeded(3)], found).backward()
    with pytest.raises(AssertionError):
        same_tensor(found[0][0], seeded(3).double())
    assert not same_tensor(found[0][0], seeded(3) + 1)
