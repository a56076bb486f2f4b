"""Every path of the native codecs gives the same bits, whatever the instructions and the number of threads."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from codec_pages import activations, decoded, encoded, odd_pages, page_key, same_bits

from tiercache import _core
from tiercache.codecs import create_codec
from tiercache.codecs.dispatch import INSTRUCTIONS, resolve_instructions
from tiercache.errors import ConfigError

PAGES = odd_pages()
PATHS = [name for name, number in INSTRUCTIONS.items() if _core.isa_available(number)]
NATIVE = ["window", "exponent", "e4m3", "int8", "int4"]


def test_the_portable_path_is_always_there_and_auto_is_the_best():
    assert "portable" in PATHS
    assert resolve_instructions("auto") == max(INSTRUCTIONS[name] for name in PATHS)
    with pytest.raises(ConfigError, match="instructions"):
        resolve_instructions("sse9")


@pytest.mark.parametrize("page", PAGES)
@pytest.mark.parametrize("name", NATIVE)
def test_each_path_writes_the_same_payload(name, page):
    tensor = PAGES[page]
    payloads = [encoded(create_codec(name, instructions=path), tensor, page_key()) for path in PATHS]
    assert all(np.array_equal(payload, payloads[0]) for payload in payloads)


@pytest.mark.parametrize("page", PAGES)
@pytest.mark.parametrize("name", NATIVE)
def test_each_path_reads_the_same_page(name, page):
    tensor = PAGES[page]
    codecs = [create_codec(name, instructions=path) for path in PATHS]
    payload = encoded(codecs[0], tensor, page_key())
    pages = [decoded(codec, payload, tensor) for codec in codecs]
    assert all(same_bits(got, pages[0]) for got in pages)
    if codecs[0].lossless:
        assert same_bits(pages[0], tensor)


@pytest.mark.parametrize("name", NATIVE)
@pytest.mark.parametrize("axis", ["tokens", "channels"])
def test_threads_change_nothing(name, axis):
    tensor = activations((9, 700, 192), seed=4)
    params = {"axis": axis} if not create_codec(name).lossless else {}
    alone, team = create_codec(name, **params), create_codec(name, threads=4, **params)
    payload = encoded(alone, tensor)
    assert np.array_equal(encoded(team, tensor), payload)
    assert same_bits(decoded(team, payload, tensor), decoded(alone, payload, tensor))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("name", ["e4m3", "int8", "int4"])
def test_lossy_paths_agree_on_other_elements(name, dtype, path):
    tensor = activations((3, 130, 72)).to(dtype)
    for axis in ("tokens", "channels"):
        codec, plain = create_codec(name, axis=axis, instructions=path), create_codec(name, axis=axis)
        payload = encoded(plain, tensor)
        assert np.array_equal(encoded(codec, tensor), payload)
        assert same_bits(decoded(codec, payload, tensor), decoded(plain, payload, tensor))


@pytest.mark.parametrize("path", PATHS)
def test_every_bf16_pattern_survives_every_path(path):
    patterns = torch.arange(-32768, 32768, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    for shape in [(65536,), (1024, 64), (64, 1024)]:
        tensor = patterns.view(shape)
        for name in ("window", "exponent"):
            codec = create_codec(name, instructions=path)
            assert same_bits(decoded(codec, encoded(codec, tensor), tensor), tensor)


@pytest.mark.parametrize("threads", [0, -1])
def test_no_threads_are_refused(threads):
    with pytest.raises(ConfigError, match="threads"):
        create_codec("exponent", threads=threads)


@pytest.mark.parametrize("seed", range(4))
def test_runs_of_rare_exponents_make_the_longest_codes(seed):
    """Codes of 8 neighbours that fill 57 to 88 bits, beside every number of bits that wait."""
    generator = torch.Generator().manual_seed(seed)
    words = torch.randn(4, 65536, generator=generator).to(torch.bfloat16).view(torch.int16)
    rare = torch.randint(100, 132, words.shape, generator=generator, dtype=torch.int32).to(torch.int16) << 7
    run = torch.rand(4, 1024, 1, generator=generator).lt(0.1).expand(4, 1024, 64).reshape(words.shape)
    run = run & torch.rand(words.shape, generator=generator).lt(0.6)
    tensor = torch.where(run, rare, words).to(torch.int16).view(torch.bfloat16).view(-1, 64)
    payloads = [encoded(create_codec("exponent", instructions=path), tensor) for path in PATHS]
    assert all(np.array_equal(payload, payloads[0]) for payload in payloads)
    assert payloads[0].size < tensor.nbytes
    assert same_bits(decoded(create_codec("exponent"), payloads[-1], tensor), tensor)


@pytest.mark.parametrize("start", [0, 1, 16, 63])
@pytest.mark.parametrize("size", [0, 1, 15, 63, 64, 65, 127, 128, 191, 1000, 70_001])
def test_a_copy_past_the_caches_writes_its_bytes_and_no_other(size, start):
    """Payloads are copied in this way on some processors only, so every one tries it here."""
    source = np.random.default_rng(size).integers(0, 256, size + 3, dtype=np.uint8)[3:]
    room = np.full(size + 192, 0xA5, np.uint8)
    begin = -room.ctypes.data % 64 + start
    _core.stream_copy(room[begin : begin + size], source)
    assert np.array_equal(room[begin : begin + size], source)
    assert (room[:begin] == 0xA5).all()
    assert (room[begin + size :] == 0xA5).all()
