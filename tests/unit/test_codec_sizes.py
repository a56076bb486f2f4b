"""Pages of awkward sizes: around blocks, of several rows a block, and of two and four gibibytes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from codec_pages import activations, decoded, encoded, page_key, same_bits

from tiercache import _core
from tiercache.codecs import CODECS, create_codec

BLOCK = 65536  # elements of the exponent codec's blocks; the others' are powers of two below
PATHS = [
    name for name, number in (("portable", 0), ("avx2", 1), ("avx512", 2)) if _core.isa_available(number)
]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", ["window", "exponent", "e4m3", "int8", "int4"])
def test_pages_of_a_block_more_or_less(name, path):
    source = activations((2 * BLOCK + 65,), seed=3)
    codec, plain = create_codec(name, instructions=path), create_codec(name)
    for length in (n + d for n in (BLOCK // 2, BLOCK, 2 * BLOCK) for d in (-65, -64, -1, 0, 1, 64, 65)):
        page = source[:length]
        payload = encoded(codec, page, page_key())
        back = decoded(codec, payload, page)
        assert same_bits(back, decoded(plain, payload, page))
        assert same_bits(back, page) or not codec.lossless


@pytest.mark.parametrize("columns", [64, 80, 576, 1536, 4096, 65536, 65600])
def test_rows_that_fill_a_block_more_or_less(columns):
    """Blocks have whole rows, and their predictions whole segments of rows."""
    rows_of_block, codec = max(BLOCK // columns, 1), create_codec("exponent")
    for rows in {1, rows_of_block - 1, rows_of_block, rows_of_block + 1, 2 * rows_of_block + 1} - {0}:
        page = activations((rows, columns), seed=rows)
        assert same_bits(decoded(codec, encoded(codec, page, page_key()), page), page)


@pytest.mark.parametrize("rows", [1023, 1024, 1025, 2049])
def test_rows_of_a_segment_more_or_less(rows):
    codec = create_codec("exponent")
    page = activations((rows, 64), seed=rows)
    assert same_bits(decoded(codec, encoded(codec, page, page_key()), page), page)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("name", ["window", "exponent", "e4m3", "int8", "int4"])
def test_large_pages_into_memory_at_any_address(name, threads, path):
    """Above a mebibyte a decoder may write past the caches, for which memory must lie at a cache line."""
    page = activations((8 * BLOCK + 65,), seed=5)
    codec = create_codec(name, instructions=path, threads=threads)
    payload = encoded(codec, page, page_key())
    around = torch.full((len(page) + 160,), 7.0, dtype=page.dtype)
    line = -around.data_ptr() % 64 // 2
    for start in (line, line + 1, line + 31, line + 32):
        around.fill_(7.0)
        codec.decode(payload, around[start : start + len(page)])
        assert same_bits(around[start : start + len(page)], decoded(codec, payload, page))
        assert same_bits(around[start : start + len(page)], page) or not codec.lossless
        assert (around[:start] == 7).all()
        assert (around[start + len(page) :] == 7).all()


def filled(num_bytes):
    """A page of real tiles, and the tile."""
    tile = activations((1024, 1024)).view(-1)
    page = torch.empty(num_bytes // 2, dtype=torch.bfloat16)
    for part in page.split(tile.numel()):
        part.copy_(tile[: part.numel()])
    return page, tile


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("num_bytes", [2**31 - 2, 2**31 + 2, 2**32 + 130])
@pytest.mark.parametrize("name", [name for name in CODECS if name != "auto"])
def test_pages_around_two_and_four_gibibytes(name, num_bytes):
    """Decoded into the page's own memory and compared with what made it: twice its bytes, with zstd four times."""
    page, tile = filled(num_bytes)
    codec = create_codec(name)
    room = np.zeros(codec.max_encoded_bytes(page.dtype, tuple(page.shape)), np.uint8)
    payload = room[: codec.encode(page, room, page_key())]
    page.zero_()
    codec.decode(payload, page)
    for part in page.split(tile.numel()):
        want = tile[: part.numel()]
        if codec.lossless:
            assert same_bits(part, want)
        else:
            limit = {"e4m3": 0.04, "int8": 0.04, "int4": 0.25}[name]
            assert (part.float() - want.float()).norm() <= limit * want.float().norm()
