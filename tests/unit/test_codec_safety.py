"""Hostile payloads: an error or a page, never an access outside, never more memory than the index announced."""

from __future__ import annotations

import ctypes
import mmap
import os
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
import zstandard
from codec_pages import activations, encoded, page_key

from tiercache import _core
from tiercache.codecs import CODECS, create_codec
from tiercache.errors import CodecError

ROOT = Path(__file__).parents[2]
NATIVE = [name for name in CODECS if name not in ("raw", "zstd", "auto")]
PAGE = mmap.PAGESIZE


class Guarded:
    """Bytes that end right before memory which may not be touched: reading past them ends the process."""

    def __init__(self, num_bytes):
        self._pages = -(-num_bytes // PAGE) * PAGE
        self._map = mmap.mmap(-1, self._pages + PAGE)
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._whole = np.frombuffer(self._map, np.uint8)
        guard = ctypes.c_void_p(self._whole.ctypes.data + self._pages)
        assert self._libc.mprotect(guard, ctypes.c_size_t(PAGE), 0) == 0

    def last(self, num_bytes):
        return self._whole[self._pages - num_bytes : self._pages]


def mutate(payload, random):
    kind = random.integers(6)
    size = payload.size
    if kind == 0:
        return payload[: random.integers(size + 1)]
    changed = payload.copy()
    if kind == 1:
        changed = np.concatenate([changed, random.integers(0, 256, random.integers(1, 40), np.uint8)])
    elif kind == 2:
        changed[random.integers(min(size, 64))] = random.integers(256)
    elif kind == 3:
        spot = random.integers(size)
        changed[spot : spot + 4] = np.array([0xFFFFFFFF], "<u4").view(np.uint8)[: max(min(4, size - spot), 0)]
    elif kind == 4:
        changed[random.integers(size)] ^= 1 << random.integers(8)
    else:
        spots = random.integers(0, size, 8)
        changed[spots] = random.integers(0, 256, 8)
    return changed


def attack(name, rounds, seed, **params):
    """Decodes mutated payloads in guarded memory; returns how many were refused."""
    random = np.random.default_rng(seed)
    codec = create_codec(name, **params)
    pages = [activations((3, 40, 64)), activations((130, 192)), activations((67,)), activations((9, 65))]
    payloads = [encoded(codec, page, page_key()) for page in pages]
    source = Guarded(2 * max(payload.size for payload in payloads) + 4096)
    target = Guarded(max(page.nbytes for page in pages))
    refused = 0
    for turn in range(rounds):
        page = pages[turn % len(pages)]
        bad = mutate(payloads[turn % len(pages)], random)
        body = source.last(bad.size)
        body[:] = bad
        out = torch.from_numpy(target.last(page.nbytes)).view(page.dtype).view(page.shape)
        try:
            codec.decode(body, out)
        except CodecError:
            refused += 1
    return refused


@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")
@pytest.mark.parametrize("name", NATIVE)
def test_ten_thousand_mutated_payloads(name):
    paths = [
        path for path, number in (("portable", 0), ("avx2", 1), ("avx512", 2)) if _core.isa_available(number)
    ]
    refused = 0
    for path in paths if name != "const" else ["none"]:
        params = {} if name == "const" else {"instructions": path}
        refused += attack(name, 10_000 // (len(NATIVE) * len(paths)) + 100, 7, **params)
    assert refused > 50


@pytest.mark.parametrize("name", ["raw", "zstd", "auto"])
def test_mutated_payloads_of_the_others(name):
    assert attack(name, 300, 3) > 50


@pytest.mark.parametrize("claim", [2**40, 2**62, 0, 999])
def test_a_small_zstd_frame_that_claims_a_terabyte_allocates_nothing(claim):
    parts = [b"\x28\xb5\x2f\xfd", bytes([0xE0]), claim.to_bytes(8, "little"), bytes([0x01, 0, 0])]
    payload = np.frombuffer(b"\x01" + b"".join(parts), np.uint8)
    with pytest.raises(CodecError):
        create_codec("zstd").decode(payload, torch.empty(1000, dtype=torch.bfloat16))


def test_a_zstd_frame_without_its_size_is_refused():
    frame = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(2000))
    payload = np.frombuffer(b"\x01" + frame, np.uint8)
    with pytest.raises(CodecError, match="size"):
        create_codec("zstd").decode(payload, torch.empty(1000, dtype=torch.bfloat16))


@pytest.mark.parametrize("name", CODECS)
def test_decoding_takes_no_more_memory_than_a_page(name):
    page = activations((64, 4096))
    codec = create_codec(name)
    payload = encoded(codec, page, page_key())
    out = torch.empty_like(page)
    codec.decode(payload, out)
    read = lambda: int(Path("/proc/self/statm").read_text().split()[1]) * PAGE  # noqa: E731
    before = read()
    for _ in range(20):
        codec.decode(payload, out)
    assert read() - before < 2 * page.nbytes


@pytest.mark.parametrize("name", CODECS)
def test_memory_is_flat_over_a_thousand_round_trips(name):
    page = activations((40, 1024))
    codec = create_codec(name)
    room = np.zeros(codec.max_encoded_bytes(page.dtype, tuple(page.shape)), np.uint8)
    out = torch.empty_like(page)

    def work(rounds):
        for _ in range(rounds):
            codec.decode(room[: codec.encode(page, room, page_key())], out)
        return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE

    before = work(300)
    assert work(1000) - before < 4 << 20


def sanitized(tmp_path, source, *flags):
    """Builds a program of the codecs under sanitizers."""
    binary = tmp_path / Path(source).stem
    core = sorted(str(file) for file in (ROOT / "tiercache" / "csrc").glob("codec_*.cpp"))
    compiler = "clang++" if shutil.which("clang++") else "clang++-14"
    command = [
        compiler,
        "-std=c++20",
        "-O1",
        "-g",
        "-ffp-contract=off",
        *flags,
        f"-I{ROOT / 'tiercache' / 'csrc'}",
    ]
    subprocess.run([*command, str(ROOT / source), *core, "-o", str(binary)], check=True, capture_output=True)
    return binary


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.skipif(
    not (shutil.which("clang++") or shutil.which("clang++-14")), reason="libFuzzer needs clang"
)
def test_a_million_mutated_inputs_under_sanitizers(tmp_path):
    binary = sanitized(tmp_path, "tests/fuzz/fuzz_codecs.cpp", "-fsanitize=fuzzer,address,undefined")
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    for number, name in enumerate(NATIVE):
        for index, page in enumerate((activations((16, 64)), activations((130, 192)))):
            payload = encoded(create_codec(name), page, page_key())
            head = bytes([number % 8, index, page.shape[0], min(page.shape[1], 255)])
            for skip in (1, 2, 9, 41):
                (corpus / f"{name}{index}{skip}").write_bytes(head + payload[skip:].tobytes())
    options = ["-runs=1000000", "-max_len=70000", "-seed=1", "-timeout=20", "-rss_limit_mb=2048"]
    done = subprocess.run(
        [str(binary), *options, str(corpus)], capture_output=True, text=True, env=dict(os.environ)
    )
    assert done.returncode == 0, done.stderr[-4000:]


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")
@pytest.mark.parametrize("name", NATIVE)
def test_a_million_mutated_payloads(name):
    params = {} if name == "const" else {"instructions": "auto"}
    assert attack(name, 1_000_000 // len(NATIVE) + 1, 11, **params) > 1000
