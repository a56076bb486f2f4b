"""Tables of the exponent codec: shared by (layer, kind), versioned, kept in a file, and pages that move away."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from codec_pages import activations, decoded, encoded, page_key, same_bits

from tiercache.codecs import TableStore, create_codec, tables
from tiercache.codecs.tables import pack_table, table_id, unpack_table
from tiercache.errors import CodecError

OWN_TABLE, NAMED_TABLE = 3, 4


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
    same = pack_table(codec.tables.current((3, "key"))[1]) == pack_table(table)
    assert same or codec.tables.version((3, "key")) > 1


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

    with ThreadPoolExecutor(len(pages)) as pool:
        list(pool.map(work, range(len(pages)), timeout=60))
    reader = create_codec("exponent", tables=TableStore(tmp_path))
    for page, payload in zip(pages, payloads, strict=True):
        assert same_bits(decoded(reader, payload, page), page)


def table(base):
    return unpack_table(bytes([0, base, 3, 0, 0, 0, 0, 0, 0, 1, 2] + [31] * 29))


def test_an_earlier_table_may_be_the_newest_again_after_a_restart(tmp_path):
    store, place = TableStore(tmp_path), (3, "key")
    for base in (100, 110, 100):
        store.publish(place, table(base))
    store.publish(place, table(100))  # which is the newest already
    for again in (store, TableStore(tmp_path)):
        again.load()
        assert again.version(place) == 3
        assert again.current(place)[1].base == 100


def test_a_new_file_of_tables_is_synced_with_its_directory(tmp_path, monkeypatch):
    """Else a power cut could leave pages whose table has no name."""
    synced = []
    monkeypatch.setattr(tables.os, "fsync", lambda fd: synced.append(os.readlink(f"/proc/self/fd/{fd}")))
    store = TableStore(tmp_path)
    store.publish((0, "key"), table(100))
    store.publish((0, "key"), table(101))
    path = str(tmp_path / TableStore.FILE)
    assert synced == [path, str(tmp_path), path]
