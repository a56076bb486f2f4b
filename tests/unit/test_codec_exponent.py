"""The exponent codec: what it gains, its code, and what it counts of a page."""

from __future__ import annotations

import heapq

import numpy as np
import pytest
import torch
from codec_pages import activations, decoded, encoded, odd_pages, page_key, same_bits

from tiercache import _core
from tiercache.codecs import create_codec
from tiercache.codecs.exponent import block_columns
from tiercache.codecs.tables import pack_table, unpack_table
from tiercache.errors import CodecError

UPPER_HALVES = 0x10


def entropy(symbols):
    counts = np.unique(symbols, return_counts=True)[1]
    share = counts / counts.sum()
    return -(share * np.log2(share)).sum()


def exponents(tensor):
    return (tensor.contiguous().view(torch.int16).numpy().view(np.uint16) >> 7 & 255).astype(np.uint8)


def test_gains_at_least_what_plain_exponents_allow():
    tensor = activations((8, 2048, 64))
    bound = 16 / (8 + entropy(exponents(tensor)))
    assert tensor.nbytes / encoded(create_codec("exponent"), tensor).size > bound


def test_noise_costs_no_more_than_its_head():
    noise = odd_pages()["noise"]
    assert encoded(create_codec("exponent"), noise).size <= noise.nbytes + 2


@pytest.mark.parametrize("name", ["exponent", "window", "const"])
def test_a_page_of_one_value_is_a_few_bytes(name):
    page = torch.full((512, 512), -0.0, dtype=torch.bfloat16)
    codec = create_codec(name)
    payload = encoded(codec, page)
    assert payload.size < 10
    assert same_bits(decoded(codec, payload, page), page)


def test_half_a_page_of_zeros_needs_no_constant_plane():
    page = activations((512, 512)).masked_fill(torch.arange(512)[:, None] < 256, 0)
    assert page.nbytes / encoded(create_codec("exponent"), page).size > 1.5


def test_relu_pages_do_not_escape_their_zeros():
    page = activations((512, 512)).relu()
    assert page.nbytes / encoded(create_codec("exponent"), page).size > 1.5


@pytest.mark.parametrize(
    ("shape", "cols"),
    [
        ((4, 100, 64), 64),
        ((100, 576), 576),
        ((100, 80), 320),
        ((64, 1031), 64),
        ((7,), 64),
        ((), 64),
        ((2, 70000), 64),
    ],
)
def test_rows_of_a_block_follow_the_last_dimension(shape, cols):
    assert block_columns(shape) == cols


def test_fp32_made_from_bf16_is_coded_by_its_upper_halves():
    half = activations()
    codec = create_codec("exponent")
    payload = encoded(codec, half.float())
    assert payload[0] & UPPER_HALVES
    assert payload.size == encoded(codec, half).size
    assert same_bits(decoded(codec, payload, half.float()), half.float())


def test_fp32_with_one_full_mantissa_stays_whole():
    page = activations().float()
    page[0, 0, 7, 7] = 1.0000001
    codec = create_codec("exponent")
    payload = encoded(codec, page)
    assert not payload[0] & UPPER_HALVES
    assert same_bits(decoded(codec, payload, page), page)


def trained_table():
    codec = create_codec("exponent")
    encoded(codec, activations(), page_key())
    return codec.tables.current((3, "key"))[1]


def same_table(a, b):
    return (a.prediction, a.base, a.levels, a.order) == (b.prediction, b.base, b.levels, b.order)


def test_tables_pack_into_40_bytes_and_back():
    table = trained_table()
    packed = pack_table(table)
    assert len(packed) == 40
    assert same_table(unpack_table(packed), table)


LEVELS, ORDER = slice(2, 8), slice(8, 40)


@pytest.mark.parametrize(
    ("where", "value"),
    [
        (slice(0, 1), [9]),  # a prediction that there is not
        (LEVELS, [0, 0, 0, 0, 0, 0]),  # no level
        (LEVELS, [4, 0, 0, 0, 0, 0]),  # no level has 4 ranks
        (LEVELS, [8, 0, 0, 0, 0, 0]),
        (LEVELS, [1, 0, 1, 0, 0, 0]),  # a level after the last
        (LEVELS, [7, 7, 7, 7, 7, 7]),  # more ranks than symbols
        (ORDER, [0, 0, 1] + [31] * 29),  # a symbol twice
        (ORDER, [31] * 32),  # ranks without a symbol
        (ORDER, [0, 1, 2, 3] + [31] * 28),  # a symbol after the last rank
        (ORDER, [0, 1, 200] + [31] * 29),
        (slice(0, 40), [0] * 39),
    ],
)
def test_tables_that_are_no_code_are_refused(where, value):
    packed = bytearray(pack_table(unpack_table(bytes([1, 100, 3, 0, 0, 0, 0, 0, 5, 6, 7] + [31] * 29))))
    packed[where] = bytes(value)
    with pytest.raises(CodecError):
        unpack_table(bytes(packed))


LEVEL_BITS = {1: ([1], 1), 3: ([2] * 3, 2), 5: ([2, 2, 3, 3, 3], 3), 6: ([2] + [3] * 5, 3), 7: ([3] * 7, 3)}


def lengths_of(table):
    """Bits of each rank's code and of an escape's, by the format's own words."""
    lengths, before = [], 0
    for ranks in filter(None, table.levels):
        of_ranks, on = LEVEL_BITS[ranks]
        lengths += [before + bits for bits in of_ranks]
        before += on
    return lengths, before + 8


def test_lengths_make_a_complete_prefix_code():
    for seed in range(8):
        page = activations(seed=seed).float().pow(seed % 3 + 1).to(torch.bfloat16)
        codec = create_codec("exponent")
        encoded(codec, page, page_key())
        lengths, escape = lengths_of(codec.tables.current((3, "key"))[1])
        assert sum(2.0**-bits for bits in lengths) + 2.0 ** (8 - escape) == 1
        assert lengths == sorted(lengths)


def test_costs_are_the_lengths_of_the_codes():
    table, counts = trained_table(), np.zeros(257, np.uint64)
    lengths, escape = lengths_of(table)
    by_symbol = dict(zip(table.order, lengths, strict=False))
    expected = 0
    for delta in range(257):
        counts[delta] = delta + 1
        symbol = 30 if delta == 256 else (delta - table.base) % 256
        coded = delta == 256 or symbol < 30
        expected += (delta + 1) * (by_symbol.get(symbol, escape) if coded else escape)
    assert table.cost_bits(counts) == expected


def huffman_bits(counts):
    """Bits that Huffman's code takes for these counts."""
    heap = [int(count) for count in counts if count]
    heapq.heapify(heap)
    total = 0
    while len(heap) > 1:
        both = heapq.heappop(heap) + heapq.heappop(heap)
        total += both
        heapq.heappush(heap, both)
    return total


@pytest.mark.parametrize("ratio", [0.3, 0.35, 0.4, 0.45, 0.5])
def test_levels_come_near_huffman_on_what_pages_look_like(ratio):
    """Exponents fall off geometrically on both sides of the most frequent one."""
    counts = np.zeros(257, np.uint64)
    for delta in range(-10, 11):
        counts[delta % 256] = int(1e7 * ratio ** abs(delta) * (0.6 if delta > 0 else 1))
    symbols = int(counts.sum())
    levels = _core.ExponentTable.fresh_bits(counts)
    assert huffman_bits(counts) <= levels < huffman_bits(counts) + 0.02 * symbols


def test_a_table_of_a_single_symbol_codes_every_exponent():
    table = unpack_table(bytes([0, 127, 1, 0, 0, 0, 0, 0, 0] + [31] * 31))
    words = np.arange(65536, dtype=np.uint16)
    body = np.zeros(_core.exponent_bound(words.size, 64), np.uint8)
    back = np.zeros_like(words)
    for path in (n for n in (0, 1, 2) if _core.isa_available(n)):
        size = _core.exponent_encode(words, 64, table, body, path, 1)
        _core.exponent_decode(body[:size], 64, table, back, path, 1)
        assert np.array_equal(back, words)


def counts_of(words, cols, table, threads=1, path=0):
    counts = np.zeros(257, np.uint64)
    out = np.zeros(_core.exponent_bound(words.size, cols), np.uint8)
    _core.exponent_encode(words, cols, table, out, path, threads, counts)
    return counts


NO_PREDICTION = bytes([0, 100, 7, 7, 0, 0, 0, 0, *range(14)] + [31] * 18)


@pytest.mark.parametrize("cols", [64, 192, 576, 1536, 2048, 4096])
def test_all_columns_are_counted_whatever_their_number(cols):
    """So that drift in a few columns is seen, and drift is not read into a page from a few of them."""
    exponents = 100 + np.arange(cols) // 64
    words = np.tile(exponents.astype(np.uint16) << 7, 2048)
    table = unpack_table(NO_PREDICTION)
    counts = counts_of(words, cols, table)
    assert set(np.flatnonzero(counts)) == set(exponents)
    assert 2048 <= counts.sum() <= 8192
    shares = counts[counts > 0] / counts.sum()
    assert shares.max() < 2 * shares.min() + 0.05
    for path in (n for n in (0, 1, 2) if _core.isa_available(n)):
        assert np.array_equal(counts_of(words, cols, table, threads=4, path=path), counts)


def test_small_pages_are_counted_too():
    table = unpack_table(NO_PREDICTION)
    assert counts_of(np.full(64 * 64, 100 << 7, np.uint16), 64, table)[100] == 1024


def test_pages_of_half_a_block_fit_the_table_of_the_first_one():
    """A table, and the drift from it, told from too few exponents would make each small page carry its own."""
    pages = torch.randn(48, 256, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    codec = create_codec("exponent")
    heads = {bytes(encoded(codec, pages[2 * n : 2 * n + 2], page_key(node=n + 1))[:41]) for n in range(24)}
    assert len(heads) == 1
