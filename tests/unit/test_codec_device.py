"""The device codecs without a card: every thread's function is run on the host, and the kernels are compiled."""

from __future__ import annotations

import shutil
import subprocess

import numpy as np
import pytest
import torch
from codec_pages import activations, encoded, odd_pages, page_key, same_bits

from tiercache import _core
from tiercache.codecs import create_codec
from tiercache.codecs.device import DeviceCodec, kernel_source
from tiercache.codecs.quant import AXES, ELEMENTS, page_shape
from tiercache.codecs.views import contiguous_bytes
from tiercache.errors import CodecError, ConfigError

PAGES = odd_pages()
LOSSY = {"e4m3": 0, "int8": 1, "int4": 2}
WINDOW, QUANT = 1, 1


@pytest.mark.parametrize("page", PAGES)
def test_window_on_the_device_writes_the_hosts_bits(page):
    words = contiguous_bytes(PAGES[page]).view(np.uint16)
    room = np.full(_core.window_bound(words.size) + 64, 0x5A, np.uint8)
    length = _core.emulate_window_encode(words, room[:-64])
    want = np.zeros_like(room)
    assert length == _core.window_encode(words, want[:-64], 0, 1)
    assert np.array_equal(room[:length], want[:length])
    assert (room[-64:] == 0x5A).all()
    back = np.zeros_like(words)
    assert _core.emulate_window_decode(room[:length], back)
    assert np.array_equal(back, words)


@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("page", PAGES)
@pytest.mark.parametrize("name", LOSSY)
def test_lossy_formats_on_the_device_write_the_hosts_bits(name, page, axis):
    for dtype in ELEMENTS:
        tensor = PAGES[page].to(dtype)
        codec = create_codec(name, axis=axis)
        payload = encoded(codec, tensor, page_key())
        shape, kind = page_shape(tuple(tensor.shape), AXES[axis]), (LOSSY[name], ELEMENTS[dtype])
        body = np.zeros(payload.size + 2 * tensor.nbytes + 4096, np.uint8)
        length = _core.emulate_quant_encode(
            contiguous_bytes(tensor), shape, kind, codec.seed_of(page_key()), body
        )
        if payload[0] != QUANT:  # stored as it is: the lossy form is no smaller, or the page is empty
            assert length + 2 > tensor.nbytes or not tensor.numel()
            continue
        assert np.array_equal(body[:length], payload[2:])
        back = torch.empty_like(tensor)
        assert _core.emulate_quant_decode(payload[2:], shape, kind, back.view(-1).view(torch.uint8).numpy())
        again = torch.empty_like(tensor)
        codec.decode(payload, again)
        assert same_bits(back, again)


@pytest.mark.parametrize("room", [0, 100, 5000])
def test_a_body_that_does_not_fit_is_announced_and_not_written(room):
    words = contiguous_bytes(PAGES["noise"]).view(np.uint16)
    fixed = _core.window_bound(words.size) - words.size // 64 * 64
    body = np.full(fixed + room + 64, 0x5A, np.uint8)
    length = _core.emulate_window_encode(words, body[: fixed + room])
    assert length > fixed + room
    assert (body[fixed + room :] == 0x5A).all()


def test_damaged_bodies_set_the_flag():
    words = contiguous_bytes(PAGES["activations"]).view(np.uint16)
    body = np.zeros(_core.window_bound(words.size), np.uint8)
    length = _core.emulate_window_encode(words, body)
    assert not _core.emulate_window_decode(body[: length - 1], np.zeros_like(words))
    assert not _core.emulate_window_decode(body[:50], np.zeros_like(words))


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc on this machine")
def test_the_kernels_compile_for_sm_80_and_sm_90(tmp_path):
    source, folder = kernel_source()
    file = tmp_path / "kernels.cu"
    file.write_text(source)
    targets = [f"-gencode=arch=compute_{number},code=sm_{number}" for number in (80, 90)]
    options = ["-std=c++17", "-fmad=false", "-fatbin", f"-I{folder}", "-Werror", "all-warnings"]
    command = ["nvcc", *targets, *options, "-o", str(tmp_path / "k.fatbin"), str(file)]
    done = subprocess.run(command, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()
    assert (tmp_path / "k.fatbin").stat().st_size > 0


def test_every_kernel_that_is_launched_exists():
    source, _ = kernel_source()
    launched = {
        "write_head",
        "scan_counts",
        "window_encode_groups",
        "window_count_escapes",
        "window_write_escapes",
    }
    for name in launched | {"window_decode_groups", "quant_count_exceptions"}:
        assert f"__global__ void {name}(" in source
    for name in LOSSY:
        for element in ("bf16", "half", "single"):
            assert f"TC_QUANT({name}_{element}, " in source


@pytest.mark.parametrize("name", ["window", *LOSSY])
def test_sizes_on_the_device_are_those_of_the_host(name):
    for axis in AXES:
        for tensor in (activations((2, 130, 70)), activations((64, 64)), activations((7, 3))):
            codec = DeviceCodec(name, axis=axis)
            if name == "window":
                least = _core.window_bound(tensor.numel()) - tensor.numel() // 64 * 64
            else:
                shape, kind = page_shape(tuple(tensor.shape), AXES[axis]), (LOSSY[name], 0)
                finite = torch.ones_like(tensor)
                body = np.zeros(4 * tensor.nbytes + 64, np.uint8)
                least = _core.emulate_quant_encode(contiguous_bytes(finite), shape, kind, 0, body)
            assert codec._fixed_bytes(tensor) == least


def test_wrong_tensors_are_refused_before_any_launch():
    codec = DeviceCodec("window")
    page = activations((64, 64))
    length = torch.zeros(1, dtype=torch.int64)
    with pytest.raises(CodecError, match="CUDA"):
        codec.encode(page, torch.zeros(codec.room_bytes(page), dtype=torch.uint8), length)
    with pytest.raises(ConfigError, match="device codec"):
        DeviceCodec("exponent")
    with pytest.raises(ConfigError, match="axis"):
        DeviceCodec("int8", axis="rows")
