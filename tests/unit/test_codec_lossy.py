"""The lossy codecs: how wrong they are, what they keep exact, and what they refuse."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import torch
from codec_pages import activations, decoded, encoded, page_key, same_bits

from tiercache.codecs import create_codec
from tiercache.errors import CodecError, ConfigError

LOSSY = ["e4m3", "int8", "int4"]
RATIO = {"e4m3": 1.93, "int8": 1.93, "int4": 3.5}
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def gaussian(shape=(2, 256, 192), dtype=torch.bfloat16, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("name", LOSSY)
def test_ratio(name):
    page = gaussian((4, 512, 64))
    assert page.nbytes / encoded(create_codec(name), page).size >= RATIO[name]


@pytest.mark.parametrize("axis", ["tokens", "channels"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_int8_is_wrong_by_half_a_step_of_its_group(dtype, axis):
    page = gaussian(dtype=dtype)
    codec = create_codec("int8", axis=axis)
    back = decoded(codec, encoded(codec, page), page)
    groups = page.float().unflatten(1, (-1, 64)) if axis == "tokens" else page.float().unflatten(2, (-1, 64))
    dim = 2 if axis == "tokens" else 3
    step = (groups.abs().amax(dim, keepdim=True) / 127).log2().ceil().exp2()
    error = (back.float() - page.float()).view(groups.shape).abs()
    rounding = back.float().abs().view(groups.shape) * torch.finfo(dtype).eps
    assert (error <= step * 0.5 + rounding).all()


@pytest.mark.parametrize("axis", ["tokens", "channels"])
def test_e4m3_rounds_as_torch_does(axis):
    page = gaussian((1, 64, 64))
    codec = create_codec("e4m3", axis=axis)
    payload = encoded(codec, page)
    scales = torch.from_numpy(payload[2 : 2 + 128].copy()).view(torch.bfloat16).float()
    scales = scales if axis == "tokens" else scales[:, None]
    codes = torch.from_numpy(payload[130:].copy()).view(torch.float8_e4m3fn).view(64, 64)
    assert torch.equal(codes.float(), (page[0].float() * (1 / scales)).to(torch.float8_e4m3fn).float())
    assert same_bits(decoded(codec, payload, page)[0], (codes.float() * scales).to(torch.bfloat16))


def test_every_e4m3_code_decodes_as_torch_says():
    codec = create_codec("e4m3", axis="channels")
    page = torch.ones(1, 256, dtype=torch.float32)
    payload = encoded(codec, page)
    payload[2:10] = np.frombuffer(torch.ones(4, dtype=torch.bfloat16).view(torch.uint8).numpy(), np.uint8)
    codes = torch.arange(256, dtype=torch.uint8)
    payload[10:] = codes.numpy()
    got = decoded(codec, payload, page)[0]
    want = codes.view(torch.float8_e4m3fn).float()
    finite = want.isfinite()
    assert finite.sum() == 254
    assert torch.equal(got[finite], want[finite])


def test_int4_has_no_bias():
    page = gaussian((1, 64, 1024), dtype=torch.float32)
    total = torch.zeros_like(page)
    draws = 400
    for seed in range(draws):
        codec = create_codec("int4", seed=seed)
        total += decoded(codec, encoded(codec, page), page)
    codec = create_codec("int4")
    one = (decoded(codec, encoded(codec, page), page) - page).std()
    mean_error = total / draws - page
    assert mean_error.std() < 1.15 * one / draws**0.5
    assert abs(mean_error.mean()) < 4 * one / (draws * page.numel()) ** 0.5


def test_int4_draws_by_page_seed_and_index_and_by_nothing_else():
    page = gaussian()
    first = encoded(create_codec("int4"), page, page_key(node=1))
    assert np.array_equal(first, encoded(create_codec("int4"), page, page_key(node=1)))
    assert not np.array_equal(first, encoded(create_codec("int4"), page, page_key(node=2)))
    assert not np.array_equal(first, encoded(create_codec("int4", seed=1), page, page_key(node=1)))


@pytest.mark.parametrize("name", LOSSY)
def test_decoding_gives_the_same_values_every_time(name):
    page = activations()
    codec = create_codec(name)
    payload = encoded(codec, page, page_key())
    first = decoded(codec, payload, page)
    assert same_bits(first, decoded(create_codec(name), payload, page))


@pytest.mark.parametrize("axis", ["tokens", "channels"])
@pytest.mark.parametrize("name", ["e4m3", "int8"])
def test_decoded_values_survive_a_second_encoding(name, axis):
    """So a page whose values were fixed on the device is still half its size when it is demoted later."""
    for page in (activations((2, 3, 400, 64)), gaussian((5, 130, 70))):
        codec = create_codec(name, axis=axis)
        fixed = decoded(codec, encoded(codec, page), page)
        again = encoded(codec, fixed)
        assert again.size < 0.6 * page.nbytes
        assert same_bits(decoded(codec, again, fixed), fixed)


@pytest.mark.parametrize("kind", ["grad_key", "grad_value", "grad_state", "grad_layer_input"])
@pytest.mark.parametrize("name", LOSSY)
def test_gradient_pages_are_refused(name, kind):
    codec = create_codec(name)
    page = gaussian()
    out = np.zeros(codec.max_encoded_bytes(page.dtype, tuple(page.shape)), np.uint8)
    with pytest.raises(CodecError, match="gradient"):
        codec.encode(page, out, page_key(kind))
    assert not codec.lossless


@pytest.mark.parametrize("axis", ["tokens", "channels"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", LOSSY)
def test_groups_with_values_that_are_not_finite_are_kept_and_counted(name, dtype, axis, caplog):
    page = gaussian((3, 130, 70), dtype=dtype)
    page[0, 5, 7] = float("inf")
    page[2, 129, 69] = float("nan")
    page[1, 64, 3] = -float("inf")
    codec = create_codec(name, axis=axis)
    with caplog.at_level(logging.WARNING, logger="tiercache.codecs.quant"):
        back = decoded(codec, encoded(codec, page), page)
        encoded(codec, page)
    assert codec.exact_groups == 6
    assert len(caplog.records) == 1
    kept = [(0, 5, 7), (2, 129, 69), (1, 64, 3)]
    for spot in kept:
        assert same_bits(back[spot], page[spot])
    neighbours = page[0, :64, 7] if axis == "tokens" else page[0, 5, :64]
    assert same_bits(back[0, :64, 7] if axis == "tokens" else back[0, 5, :64], neighbours)
    assert back.isfinite().sum() == page.isfinite().sum()


@pytest.mark.parametrize("name", LOSSY)
def test_a_page_of_nothing_finite_is_kept_whole(name):
    page = torch.full((128, 128), float("nan"), dtype=torch.bfloat16)
    page[::2] = float("inf")
    codec = create_codec(name)
    assert same_bits(decoded(codec, encoded(codec, page), page), page)


@pytest.mark.parametrize("name", LOSSY)
@pytest.mark.parametrize("value", [1e-30, 1e38, 3e-40])
def test_values_no_scale_can_hold_are_kept(name, value):
    page = torch.full((2, 64, 64), value, dtype=torch.bfloat16)
    page[0, 0, 0] = -value / 2
    codec = create_codec(name, axis="tokens")
    assert same_bits(decoded(codec, encoded(codec, page), page), page)


@pytest.mark.parametrize("name", LOSSY)
@pytest.mark.parametrize("dtype", [torch.int64, torch.float64, torch.bool, torch.complex64])
def test_other_dtypes_are_kept_exact(name, dtype):
    page = torch.arange(300).view(3, 100).to(dtype)
    codec = create_codec(name)
    assert same_bits(decoded(codec, encoded(codec, page), page), page)


@pytest.mark.parametrize("name", LOSSY)
@pytest.mark.parametrize("axis", ["tokens", "channels"])
@pytest.mark.parametrize(
    "shape", [(), (1,), (65,), (3, 1), (1, 3), (5, 63, 1), (2, 2, 129, 67), (0, 4), (4, 0, 3)]
)
def test_odd_shapes(name, axis, shape):
    page = gaussian(shape)
    codec = create_codec(name, axis=axis)
    back = decoded(codec, encoded(codec, page), page)
    assert back.shape == page.shape
    if page.numel():
        limit = {"e4m3": 0.05, "int8": 0.02, "int4": 0.25}[name]
        assert (back.float() - page.float()).abs().max() <= limit * page.float().abs().max() + 1e-6


def test_zeros_stay_zeros():
    page = torch.zeros(2, 64, 64, dtype=torch.bfloat16)
    page[1, 0, 0] = 1.0
    for name in LOSSY:
        back = decoded(create_codec(name), encoded(create_codec(name), page), page)
        assert (back[page == 0] == 0).all()


def test_keys_are_scaled_along_tokens_and_values_along_channels():
    codec = create_codec("int8")
    page = gaussian()
    axes = {
        kind: int(encoded(codec, page, page_key(kind))[1])
        for kind in ("key", "layer_input", "value", "state")
    }
    assert axes == {"key": 1, "layer_input": 1, "value": 0, "state": 0}


def test_an_outlier_channel_of_keys_harms_its_channel_alone():
    page = gaussian((1, 256, 64))
    page[..., 9] *= 200
    others = torch.arange(64) != 9
    error = {}
    for axis in ("tokens", "channels"):
        codec = create_codec("int8", axis=axis)
        back = decoded(codec, encoded(codec, page), page)
        error[axis] = (back - page)[..., others].float().norm() / page[..., others].float().norm()
    assert error["tokens"] < 0.01 < 0.1 < error["channels"]


def test_an_unknown_axis_is_refused():
    with pytest.raises(ConfigError, match="axis"):
        create_codec("int8", axis="rows")
