"""What every codec must do, whatever its name: one suite over the whole table."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from tiercache.codecs import CODECS, create_codec
from tiercache.errors import CodecError, ConfigError

LOSSLESS = [name for name in CODECS if create_codec(name).lossless]
LOSSY = [name for name in CODECS if name not in LOSSLESS]
DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int64, torch.uint8, torch.bool]


def encode(codec, tensor):
    out = np.full(codec.max_encoded_bytes(tensor.dtype, tuple(tensor.shape)) + 8, 0xA5, np.uint8)
    room = out[: out.size - 8]
    used = codec.encode(tensor, room)
    assert 0 <= used <= room.size
    assert (out[out.size - 8 :] == 0xA5).all()
    return room[:used].copy()


def bits(tensor):
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def assert_same_bits(got, want):
    assert got.dtype == want.dtype
    assert got.shape == want.shape
    assert torch.equal(bits(got), bits(want))


def round_trip(codec, tensor):
    before = bits(tensor).clone()
    payload = encode(codec, tensor)
    assert torch.equal(bits(tensor), before)
    out = torch.empty(tensor.shape, dtype=tensor.dtype)
    codec.decode(payload, out)
    return out


def sample(dtype, shape):
    generator = torch.Generator().manual_seed(7)
    if dtype.is_floating_point:
        return torch.randn(shape, generator=generator).to(dtype)
    return torch.randint(0, 2, shape, generator=generator).to(dtype)


def every_pattern(dtype):
    return torch.arange(-32768, 32768, dtype=torch.int32).to(torch.int16).view(dtype)


@pytest.mark.parametrize("name", LOSSLESS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_16_bit_pattern_survives(name, dtype):
    patterns = every_pattern(dtype)
    codec = create_codec(name)
    assert_same_bits(round_trip(codec, patterns), patterns)
    mixed = patterns[torch.randperm(65536, generator=torch.Generator().manual_seed(1))]
    assert_same_bits(round_trip(codec, mixed.view(64, 1024)), mixed.view(64, 1024))


@pytest.mark.parametrize("name", LOSSLESS)
@pytest.mark.parametrize("pattern", [0x7FC1, 0xFFFF, 0x0001, 0x807F, 0x0000, 0x8000, 0x7F80, 0x3F80])
def test_blocks_of_one_special_value(name, pattern):
    value = pattern if pattern < 0x8000 else pattern - 0x10000
    block = torch.full((300, 257), value, dtype=torch.int16).view(torch.bfloat16)
    assert_same_bits(round_trip(create_codec(name), block), block)


@pytest.mark.parametrize("name", LOSSLESS)
@pytest.mark.parametrize("kind", ["nan", "denormal", "infinity"])
def test_blocks_of_only_non_numbers(name, kind):
    mantissa = torch.randint(1, 128, (4096,), generator=torch.Generator().manual_seed(3), dtype=torch.int16)
    sign = torch.where(mantissa % 2 == 0, -32768, 0).to(torch.int16)
    word = {"nan": mantissa | 0x7F80, "denormal": mantissa, "infinity": torch.full_like(mantissa, 0x7F80)}[
        kind
    ]
    block = (word | sign).view(torch.bfloat16)
    assert_same_bits(round_trip(create_codec(name), block), block)


@pytest.mark.parametrize("name", LOSSLESS)
def test_every_short_length(name):
    codec = create_codec(name)
    source = sample(torch.bfloat16, (514,))
    for length in range(514):
        assert_same_bits(round_trip(codec, source[:length]), source[:length])


@pytest.mark.parametrize("name", LOSSLESS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 5), (1,), (7, 13), (2, 3, 5, 7), (1, 1031)])
def test_dtypes_and_odd_shapes(name, dtype, shape):
    tensor = sample(dtype, shape)
    assert_same_bits(round_trip(create_codec(name), tensor), tensor)


@pytest.mark.parametrize("name", LOSSLESS)
def test_strides_of_every_kind(name):
    codec = create_codec(name)
    base = sample(torch.bfloat16, (12, 34, 56))
    views = [
        base.transpose(0, 2),
        base[::2, 1::3, ::5],
        base[:, :, 7],
        base[:1].expand(5, 34, 56),
        base.permute(2, 0, 1)[3:],
        base[0].t(),
        base.permute(2, 1, 0),  # Fortran's order
        torch.from_numpy(np.asfortranarray(base.float().numpy())),
    ]
    for view in views:
        assert_same_bits(round_trip(codec, view), view.contiguous())


@pytest.mark.parametrize("name", LOSSY)
def test_lossy_payloads_depend_on_no_strides_and_inputs_stay_as_they_are(name):
    codec = create_codec(name)
    base = sample(torch.bfloat16, (12, 34, 56))
    views = [base.transpose(0, 2), base[::2, 1::3, ::5], base[:, :, 7], base[:1].expand(5, 34, 56)]
    for view in views:
        before = bits(view).clone()
        assert np.array_equal(encode(codec, view), encode(codec, view.contiguous()))
        assert torch.equal(bits(view), before)


@pytest.mark.parametrize("name", LOSSLESS)
def test_a_leaf_that_requires_grad_is_taken(name):
    tensor = sample(torch.float32, (33, 5)).requires_grad_()
    assert_same_bits(round_trip(create_codec(name), tensor), tensor)


@pytest.mark.parametrize("name", CODECS)
def test_same_payload_from_same_tensor(name):
    codec = create_codec(name)
    tensor = sample(torch.bfloat16, (64, 192))
    assert np.array_equal(encode(codec, tensor), encode(codec, tensor.clone()))


@pytest.mark.parametrize("name", CODECS)
def test_wrong_buffers_are_refused(name):
    codec = create_codec(name)
    tensor = sample(torch.bfloat16, (64, 64))
    payload = encode(codec, tensor)
    with pytest.raises(CodecError):
        codec.encode(tensor, np.zeros(3, np.uint8))
    with pytest.raises(CodecError):
        codec.decode(payload, torch.empty(64, 128, dtype=torch.bfloat16)[:, ::2])
    with pytest.raises(CodecError):
        codec.decode(payload[:0], torch.empty_like(tensor))
    with pytest.raises(CodecError):
        codec.decode(payload[:-1], torch.empty_like(tensor))
    with pytest.raises(CodecError):
        codec.decode(payload, torch.empty(65, 64, dtype=torch.bfloat16))


@pytest.mark.parametrize("name", CODECS)
def test_many_threads_share_one_codec(name):
    codec = create_codec(name)
    tensors = [sample(torch.bfloat16, (97, 61 + i)) for i in range(8)]
    expected = {id(tensor): round_trip(create_codec(name), tensor) for tensor in tensors}

    def work(tensor):
        for _ in range(10):
            assert_same_bits(round_trip(codec, tensor), expected[id(tensor)])

    with ThreadPoolExecutor(len(tensors)) as pool:
        list(pool.map(work, tensors, timeout=60))


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_works_in_a_forked_child(name):
    codec = create_codec(name)
    tensor = sample(torch.bfloat16, (31, 33))
    expected = round_trip(codec, tensor)
    child = os.fork()
    if child == 0:
        same = torch.equal(bits(round_trip(codec, tensor)), bits(expected))
        os._exit(0 if same else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_unknown_names_and_parameters_are_refused():
    with pytest.raises(ConfigError, match="unknown codec"):
        create_codec("gzip")
    with pytest.raises(ConfigError, match="does not take"):
        create_codec("raw", level=3)
    with pytest.raises(ConfigError, match="level"):
        create_codec("zstd", level=99)
