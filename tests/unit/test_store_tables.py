"""Tables of the exponent codec beside a disk tier's index, and what `auto` knows of a store's tiers."""

from __future__ import annotations

import itertools

import pytest
import torch
from codec_pages import activations, same_bits
from pages import key, small_store

from tiercache.codecs import TableStore
from tiercache.codecs.factory import CodecFactory, copy_gbps
from tiercache.coding import PageCodecs
from tiercache.entry import Entry
from tiercache.errors import PageCorruptError
from tiercache.tiers.disk import DiskTier

NAMED_TABLE, OWN_TABLE = 4, 3
SHAPE = (2, 256, 64)
PAGE_BYTES = 2 * 2 * 256 * 64


ALL = torch.randn(48, 256, 64, generator=torch.Generator().manual_seed(0)).bfloat16()


def value(n):
    """One of 24 pages that look alike."""
    return ALL[2 * n : 2 * n + 2].contiguous()


def disk_store(path, durability, **options):
    disk = DiskTier(path, 64 << 20, durability=durability)
    return small_store(device=80, host=None, disk=disk, codec={"key": {"disk": "exponent"}}, **options)


def fill(store, count=8):
    for n in range(count):
        store.put(key(n), value(n))
    store.flush()


def disk_payloads(store):
    """(record, payload) of every page on disk."""
    tier = store._books.tiers[1]
    found = []
    for entry in store._books.table.values():
        place = entry.places[1]
        if place is not None:
            out = torch.zeros(place.meta.stored_bytes, dtype=torch.uint8).numpy()
            tier.read(place.slot, out, place.meta)
            found.append((place.meta, out))
    return found


def test_pages_of_a_kept_directory_name_their_table(tmp_path):
    with disk_store(tmp_path, "process") as store:
        fill(store)
        payloads = disk_payloads(store)
        assert payloads
        assert {(meta.codec, payload[0]) for meta, payload in payloads} == {("exponent", NAMED_TABLE)}
    assert (tmp_path / TableStore.FILE).exists()
    assert TableStore(tmp_path).version((0, "key")) == 1


def test_pages_of_a_scratch_directory_carry_theirs(tmp_path):
    with disk_store(tmp_path, "scratch") as store:
        fill(store)
        assert {payload[0] for _, payload in disk_payloads(store)} == {OWN_TABLE}
    assert not (tmp_path / TableStore.FILE).exists()


def test_a_later_store_goes_on_with_the_tables_and_reads_the_pages(tmp_path):
    with disk_store(tmp_path, "process") as store:
        fill(store)
        kept = [(meta, payload.copy()) for meta, payload in disk_payloads(store)]
    with disk_store(tmp_path, "process") as store:
        fill(store)
        codecs = store._puts._codecs
        for meta, payload in kept:
            out = torch.empty(SHAPE, dtype=torch.bfloat16)
            codecs.decode(payload, meta, out)
            number = int.from_bytes(meta.key.node[:4], "big")
            assert same_bits(out, value(number))
    assert TableStore(tmp_path).version((0, "key")) == 1


def test_a_read_only_directory_is_read_and_not_written(tmp_path):
    store = TableStore(tmp_path)
    codecs = PageCodecs("exponent", CodecFactory())
    codecs._factory.tables.keep_in(tmp_path, writable=False)
    page = activations(SHAPE)
    payload, meta = encoded(codecs, page)
    assert payload[0] == OWN_TABLE
    assert not (tmp_path / TableStore.FILE).exists()
    out = torch.empty_like(page)
    codecs.decode(payload, meta, out)
    assert same_bits(out, page)
    assert store.version((0, "key")) == 0


class FakeTier:
    name = "disk"


def encoded(codecs, page):
    entry = Entry(key(1), page.dtype, tuple(page.shape), page.device, 2)
    entry.coding = codecs.of(key(1))
    memory = [
        torch.zeros(size, dtype=torch.uint8).numpy() for size in codecs.sizes(entry, FakeTier(), again=True)
    ]
    source = codecs.encode(entry, page, FakeTier(), bytes(32), memory, again=True)
    return source.data, source.meta


def test_a_lost_table_is_a_lost_page_and_never_a_wrong_one(tmp_path):
    with disk_store(tmp_path, "process") as store:
        fill(store, 3)
        meta, payload = disk_payloads(store)[0]
        payload = payload.copy()
    codecs = PageCodecs("exponent", CodecFactory())
    with pytest.raises(PageCorruptError, match=r"codec_tables\.jsonl"):
        codecs.decode(payload, meta, torch.empty(SHAPE, dtype=torch.bfloat16))


# auto


def autos(store):
    return {tier: codec for (name, tier), codec in store._puts._codecs._made.items() if name == "auto"}


def test_auto_knows_each_tiers_speed_and_learns_from_reads(tmp_path):
    disk = DiskTier(tmp_path, 64 << 20)
    with small_store(device=80, host=80, disk=disk, codec="auto") as store:
        codecs = autos(store)
        assert set(codecs) == {"host", "disk"}
        assert codecs["host"]._read_s_per_byte == pytest.approx(1e-9 / copy_gbps())
        before = codecs["disk"]._read_s_per_byte
        fill(store, 24)
        for n in range(24):
            with store.read(key(n)) as lease:
                assert same_bits(lease.tensor, value(n))
        assert codecs["disk"]._read_s_per_byte != before
        assert codecs["host"]._read_s_per_byte == pytest.approx(1e-9 / copy_gbps())
        assert set(codecs["disk"].choices()) <= {"key/torch.bfloat16"}


def test_drives_that_were_measured_before_are_told_at_open(tmp_path):
    class Measured(DiskTier):
        def stats(self):
            stats = super().stats()
            stats["drives"][0]["read_bytes_per_s"] = 7e8
            return stats

    with small_store(device=80, host=None, disk=Measured(tmp_path, 64 << 20), codec="auto") as store:
        assert autos(store)["disk"]._read_s_per_byte == pytest.approx(1 / 7e8)


def count_calls(monkeypatch, codec):
    calls = {"encode": 0, "decode": 0}
    for name in calls:
        inner = getattr(codec, name)

        def counted(*args, name=name, inner=inner):
            calls[name] += 1
            return inner(*args)

        monkeypatch.setattr(codec, name, counted)
    return calls


@pytest.mark.parametrize(("gbps", "stored"), [(1e6, "raw"), (0.001, "auto")])
def test_auto_codes_a_page_once_on_its_way_down_and_not_at_all_where_it_stays_raw(
    tmp_path, monkeypatch, gbps, stored
):
    disk = DiskTier(tmp_path, 64 << 20)
    with small_store(device=80, host=1200, disk=disk, codec="auto") as store:
        for codec in autos(store).values():
            codec.tell_speed(gbps)
            monkeypatch.setattr(codec, "observe", lambda *_: None)
            ticks = itertools.count()  # every codec takes as long as every other: the tier's speed decides
            monkeypatch.setattr(codec, "_clock", lambda ticks=ticks: next(ticks) * 1e-6)
        calls = {tier: count_calls(monkeypatch, codec) for tier, codec in autos(store).items()}
        fill(store, 24)
        for n in range(24):
            with store.read(key(n)) as lease:
                assert same_bits(lease.tensor, value(n))
        metas = {meta.codec for meta, _ in disk_payloads(store)}
        assert stored in metas
        assert calls["host"]["encode"] <= (1 if stored == "raw" else 48)
        assert calls["disk"]["encode"] <= 2  # its own measurement, and one that ran beside it
