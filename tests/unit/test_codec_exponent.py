"""The exponent codec: what it gains, its tables, and pages that move away from them."""

from __future__ import annotations

import heapq
import threading

import numpy as np
import pytest
import torch
from codec_pages import activations, decoded, encoded, odd_pages, page_key, same_bits

from tiercache import _core
from tiercache.codecs import TableStore, create_codec
from tiercache.codecs.exponent import block_columns
from tiercache.codecs.tables import pack_table, table_id, unpack_table
from tiercache.errors import CodecError

OWN_TABLE, NAMED_TABLE, UPPER_HALVES = 3, 4, 0x10


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


def test_pages_of_a_place_share_the_table_of_its_first_page(tmp_path):
    codec = create_codec("exponent", tables=TableStore(tmp_path))
    payloads = [encoded(codec, activations(seed=seed), page_key(node=seed + 1)) for seed in range(4)]
    assert {bytes(payload[:9]) for payload in payloads} == {bytes(payloads[0][:9])}
    assert payloads[0][0] == NAMED_TABLE
    assert codec.tables.version((3, "key")) == 1


def test_without_a_directory_pages_carry_their_table():
    codec = create_codec("exponent")
    page = activations()
    payload = encoded(codec, page, page_key())
    assert payload[0] == OWN_TABLE
    assert same_bits(decoded(create_codec("exponent"), payload, page), page)


def test_a_page_that_moved_gets_its_own_table_and_a_lasting_move_a_new_version(tmp_path):
    codec = create_codec("exponent", tables=TableStore(tmp_path))
    encoded(codec, activations(), page_key())
    generator = torch.Generator().manual_seed(0)
    moved = torch.randn(1, 3, 400, 64, generator=generator).pow(5).to(torch.bfloat16)
    first = encoded(codec, moved, page_key())
    assert first[0] == OWN_TABLE
    fresh = encoded(create_codec("exponent"), moved)
    assert first.size <= 1.005 * fresh.size
    for _ in range(4):
        last = encoded(codec, moved, page_key())
    assert last[0] == NAMED_TABLE
    assert codec.tables.version((3, "key")) == 2
    assert same_bits(decoded(codec, last, moved), moved)
    assert same_bits(decoded(codec, first, moved), moved)


def test_drift_is_two_percent_over_a_fresh_table():
    codec = create_codec("exponent")
    encoded(codec, activations(), page_key())
    table = codec.tables.current((3, "key"))[1]
    for seed in range(1, 6):
        page = activations(seed=seed, scale=1.7**seed)
        payload = encoded(codec, page, page_key())
        fresh = encoded(create_codec("exponent"), page, page_key())
        # Exponents are a quarter of the page: 2 % of them is about half a percent of it.
        assert payload.size <= 1.01 * fresh.size
    assert same_table(codec.tables.current((3, "key"))[1], table) or codec.tables.version((3, "key")) > 1


def test_another_process_finds_the_tables(tmp_path):
    page = activations()
    payload = encoded(create_codec("exponent", tables=TableStore(tmp_path)), page, page_key())
    assert same_bits(decoded(create_codec("exponent", tables=TableStore(tmp_path)), payload, page), page)


def test_a_reader_notices_tables_that_came_later(tmp_path):
    reader = create_codec("exponent", tables=TableStore(tmp_path))
    page = activations()
    payload = encoded(create_codec("exponent", tables=TableStore(tmp_path)), page, page_key())
    assert same_bits(decoded(reader, payload, page), page)


def test_a_lost_table_is_an_error_that_names_the_file(tmp_path):
    page = activations()
    payload = encoded(create_codec("exponent", tables=TableStore(tmp_path)), page, page_key())
    with pytest.raises(CodecError, match=r"codec_tables\.jsonl"):
        decoded(create_codec("exponent"), payload, page)


def test_a_torn_last_line_is_ignored_and_the_next_one_is_whole(tmp_path):
    store = TableStore(tmp_path)
    codec = create_codec("exponent", tables=store)
    encoded(codec, activations(), page_key())
    path = tmp_path / TableStore.FILE
    whole = path.read_bytes()
    path.write_bytes(whole + whole[: len(whole) // 2])
    again = TableStore(tmp_path)
    assert again.version((3, "key")) == 1
    encoded(create_codec("exponent", tables=again), activations(seed=5), page_key(layer=4))
    assert TableStore(tmp_path).version((4, "key")) == 1
    assert path.stat().st_mode & 0o777 == 0o600


def test_tables_of_another_format_are_refused(tmp_path):
    (tmp_path / TableStore.FILE).write_text(
        '{"format": 99, "layer": 0, "kind": "key", "version": 1, "table": ""}\n'
    )
    with pytest.raises(CodecError, match="format"):
        TableStore(tmp_path)


def test_tables_in_memory_can_be_saved_later(tmp_path):
    codec = create_codec("exponent")
    page = activations()
    encoded(codec, page, page_key())
    codec.tables.save(tmp_path)
    payload = encoded(codec, page, page_key())
    assert payload[0] == NAMED_TABLE
    assert same_bits(decoded(create_codec("exponent", tables=TableStore(tmp_path)), payload, page), page)


def test_ids_depend_on_the_table_alone():
    packed = bytes([1, 2]) + bytes(38)
    assert table_id(packed) == table_id(packed)
    assert table_id(packed) != table_id(packed[:-1] + b"\1")


def test_threads_publish_one_table_at_a_time(tmp_path):
    codec = create_codec("exponent", tables=TableStore(tmp_path))
    pages = [activations(seed=seed) for seed in range(6)]
    payloads = [None] * len(pages)

    def work(index):
        payloads[index] = encoded(codec, pages[index], page_key())

    team = [threading.Thread(target=work, args=(index,)) for index in range(len(pages))]
    for thread in team:
        thread.start()
    for thread in team:
        thread.join(timeout=60)
    reader = create_codec("exponent", tables=TableStore(tmp_path))
    for page, payload in zip(pages, payloads, strict=True):
        assert same_bits(decoded(reader, payload, page), page)
