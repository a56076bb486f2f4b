"""Damaged, swapped and hostile files: a miss with a reason or a named error, never wrong bytes."""

from __future__ import annotations

import json
import os
import random
import shutil
from pathlib import Path

import numpy as np
import pytest
from disk_pages import MIB, check_hit, data_of, flip, get, key_of, meta_of, only_segment, put, run_python

from tiercache.errors import ConfigError, PageCorruptError, PageStateError, TierFullError, TierIOError
from tiercache.tiers.disk import DiskTier
from tiercache.tiers.disk_reader import DiskReader

CAPACITY = 16 * MIB


def reopen(root: Path, **options: object) -> DiskTier:
    return DiskTier(root, CAPACITY, **{"durability": "process", **options})


@pytest.fixture
def root(tmp_path):
    """A store with pages 0 to 4, closed."""
    tier = reopen(tmp_path)
    for number in range(5):
        put(tier, number)
    tier.close()
    return tmp_path


def test_records_outlive_the_process_that_wrote_them(root):
    tier = reopen(root)
    assert all(check_hit(tier, number) for number in range(5))
    assert tier.stats()["adopted"] == 5
    assert tier.used_bytes == sum(entry.length for entry in _entries(root, tier))
    tier.check_integrity()
    tier.close()


def _entries(root: Path, tier: DiskTier):
    from tiercache.tiers.disk_meta import entry_of

    return [entry_of(value) for _, value in tier.core.records()]


def test_every_single_bit_of_a_header_counts(root):
    """32,768 flips, each read through the reader; and a tenth of them reported by the reader as a named reason."""
    reader = DiskReader(root)
    entry = next(entry for entry in reader.entries() if entry.meta.digest == key_of(1).digest)
    out = np.empty(entry.meta.stored_bytes, np.uint8)
    path = only_segment(root)
    handle = os.open(path, os.O_RDWR)
    header = bytearray(os.pread(handle, 4096, entry.offset))
    believed = []
    for byte in range(4096):
        for bit in range(8):
            os.pwrite(handle, bytes([header[byte] ^ (1 << bit)]), entry.offset + byte)
            try:
                reader.core.read(entry.value, out)
                believed.append((byte, bit))
            except PageCorruptError:
                pass
        os.pwrite(handle, header[byte : byte + 1], entry.offset + byte)
    os.close(handle)
    assert believed == []
    reader.core.read(entry.value, out)
    assert np.array_equal(out, data_of(1, out.size))
    reader.close()


def test_ten_thousand_random_payload_bits_count(root):
    rng = random.Random(11)
    reader = DiskReader(root)
    entries = list(reader.entries())
    handle = os.open(only_segment(root), os.O_RDWR)
    for _ in range(10_000):
        entry = rng.choice(entries)
        at = entry.offset + 4096 + rng.randrange(entry.meta.stored_bytes)
        value = os.pread(handle, 1, at)
        os.pwrite(handle, bytes([value[0] ^ (1 << rng.randrange(8))]), at)
        with pytest.raises(PageCorruptError, match="payload checksum"):
            reader.core.read(entry.value, np.empty(entry.meta.stored_bytes, np.uint8))
        os.pwrite(handle, value, at)
    os.close(handle)
    reader.close()


def test_a_bad_record_is_a_miss_by_reason_and_stays_out_of_use(root):
    entries = {entry.meta.digest: entry for entry in DiskReader(root).entries()}
    flip(only_segment(root), entries[key_of(2).digest].offset + 100, 3)
    flip(only_segment(root), entries[key_of(3).digest].offset + 4096, 0)
    tier = reopen(root)
    used = tier.used_bytes
    assert [check_hit(tier, number) for number in range(5)] == [True, True, False, False, True]
    assert tier.stats()["misses"] == {"header checksum": 1, "payload checksum": 1}
    for number in (2, 3):
        assert tier.lookup(key_of(number).digest) is None
    withheld = sum(entries[key_of(n).digest].length for n in (2, 3))
    assert tier.used_bytes == used  # the slots still stand until somebody ends them
    put(tier, 2)
    assert check_hit(tier, 2)
    tier.close()
    again = reopen(root)
    assert [check_hit(again, number) for number in range(5)] == [True, True, True, False, True]
    assert again.used_bytes < used
    assert withheld > 0
    again.close()


def test_another_namespace_is_a_miss(root):
    tier = reopen(root)
    slot, _ = tier.lookup(key_of(1).digest)
    other = meta_of(1, slot.num_bytes)
    other = type(other)(
        other.digest,
        bytes(32),
        *[getattr(other, f) for f in ("dtype", "shape", "codec")],
        *[slot.num_bytes] * 2,
    )
    with pytest.raises(PageCorruptError, match="another namespace"):
        tier.read(slot, np.empty(slot.num_bytes, np.uint8), other)
    assert check_hit(tier, 1)
    assert tier.stats()["misses"] == {"another namespace": 1}
    tier.close()


@pytest.mark.parametrize("cut", ["tail", "half", "header", "empty"])
def test_a_truncated_segment_is_misses(root, cut):
    path = only_segment(root)
    size = path.stat().st_size
    os.truncate(path, {"tail": size - 4096, "half": size // 2 + 1, "header": 4096, "empty": 0}[cut])
    tier = reopen(root)
    assert not any(check_hit(tier, number) for number in range(5))
    assert tier.used_bytes == 0
    put(tier, 7)
    assert check_hit(tier, 7)
    tier.close()


def test_a_segment_truncated_under_an_open_store_is_misses(root):
    tier = reopen(root)
    os.truncate(only_segment(root), 8192)
    assert not any(check_hit(tier, number) for number in range(5))
    assert sum(tier.stats()["misses"].values()) == 5
    tier.close()


def test_swapped_and_duplicated_segments_are_misses(tmp_path):
    tier = reopen(tmp_path, segment_bytes=MIB)
    for number in range(8):
        put(tier, number, 300_000)
    tier.close()
    first, second, *others = sorted((tmp_path / "drive0").iterdir())
    assert others
    first.rename(tmp_path / "parked")
    second.rename(first)
    (tmp_path / "parked").rename(second)
    shutil.copy(others[0], others[0].with_name("0099.seg"))
    again = reopen(tmp_path, segment_bytes=MIB)
    hits = [check_hit(again, number) for number in range(8)]
    assert 0 < sum(hits) < 8
    assert len(again.refused_files) == 3
    assert all("under another name" in line for line in again.refused_files)
    put(again, 50)
    assert check_hit(again, 50)
    again.check_integrity()
    again.close()


def test_a_segment_of_another_store_is_refused(root, tmp_path_factory):
    other = tmp_path_factory.mktemp("other")
    tier = reopen(other)
    put(tier, 1)
    tier.close()
    shutil.copy(only_segment(other), only_segment(root).with_name("0031.seg"))
    again = reopen(root)
    assert "of another store" in again.refused_files[0]
    assert all(check_hit(again, number) for number in range(5))
    again.close()


def test_a_stale_record_of_a_reused_extent_is_not_believed(tmp_path):
    """The header's checksum is seeded with store, epoch, segment and offset: a copy elsewhere proves nothing."""
    tier = reopen(tmp_path)
    for number in range(3):
        put(tier, number, 8192)
    tier.close()
    entries = {entry.meta.digest: entry for entry in DiskReader(tmp_path).entries()}
    source, target = entries[key_of(0).digest], entries[key_of(1).digest]
    handle = os.open(only_segment(tmp_path), os.O_RDWR)
    os.pwrite(handle, os.pread(handle, source.length, source.offset), target.offset)
    os.close(handle)
    tier = reopen(tmp_path)
    assert [check_hit(tier, number) for number in range(3)] == [True, False, True]
    tier.close()


def test_the_segments_alone_bring_everything_back(root):
    shutil.rmtree(root / "index")
    tier = reopen(root)
    assert all(check_hit(tier, number) for number in range(5))
    tier.close()
    tier = reopen(root)
    assert tier.stats()["adopted"] == 5
    tier.close()


def test_rebuild_takes_the_newest_record_and_no_scratch_ones(tmp_path):
    tier = reopen(tmp_path)
    tier.write(tier.reserve(5000), data_of(1, 5000), meta_of(1, 5000))
    newer = tier.reserve(5000)
    tier.write(newer, data_of(77, 5000), meta_of(1, 5000))
    put(tier, 2, persistent=False)
    tier.close()
    shutil.rmtree(tmp_path / "index")
    tier = reopen(tmp_path)
    slot, meta = tier.lookup(key_of(1).digest)
    out = np.empty(5000, np.uint8)
    tier.read(slot, out, meta)
    assert np.array_equal(out, data_of(77, 5000))
    assert tier.lookup(key_of(2).digest) is None
    tier.close()


@pytest.mark.parametrize("damage", ["garbage", "empty", "meta", "pages", "missing"])
def test_a_damaged_index_costs_at_most_a_rebuild(root, damage):
    path = root / "index" / "data.mdb"
    content = bytearray(path.read_bytes())
    if damage == "garbage":
        content[:] = os.urandom(len(content))
    elif damage == "empty":
        content.clear()
    elif damage == "meta":
        content[:8192] = os.urandom(8192)
    elif damage == "pages":
        content[8192:] = os.urandom(len(content) - 8192)
    path.write_bytes(content)
    if damage == "missing":
        path.unlink()
    tier = reopen(root)
    assert all(check_hit(tier, number) for number in range(5))
    tier.close()


def test_index_entries_that_point_nowhere_are_dropped(root):
    """Bits of entries flipped inside LMDB: the entry's own checksum refuses it."""
    import lmdb

    with lmdb.open(str(root / "index"), map_size=1 << 24) as env, env.begin(write=True) as txn:
        for number, (key, value) in enumerate(list(txn.cursor())):
            damaged = bytearray(value)
            damaged[number * 60 % len(damaged)] ^= 1
            txn.put(key, bytes(damaged) if number else value[:-9])
    tier = reopen(root)
    assert not any(check_hit(tier, number) for number in range(5))
    assert tier.used_bytes == 0
    tier.close()


@pytest.mark.parametrize("name", ["0007.seg", "LOCK", "STORE", "index"])
def test_symlinks_are_not_followed(root, tmp_path_factory, name):
    secret = tmp_path_factory.mktemp("elsewhere") / "secret"
    secret.write_bytes(b"x" * 8192)
    place = root / "drive0" / name if name.endswith("seg") else root / name
    if place.is_dir():
        shutil.rmtree(place)
    elif place.exists():
        place.unlink()
    place.symlink_to(secret)
    if name == "index":  # replaced by a real one, from the segments
        tier = reopen(root)
        assert all(check_hit(tier, number) for number in range(5))
        tier.close()
    else:
        with pytest.raises((PageCorruptError, TierIOError), match=name):
            reopen(root)
    assert secret.read_bytes() == b"x" * 8192


@pytest.mark.parametrize("kind", ["fifo", "directory", "name"])
def test_files_that_are_no_segments_are_an_error(root, kind):
    place = root / "drive0" / ("evil.seg" if kind == "name" else "0009.seg")
    if kind == "fifo":
        os.mkfifo(place)
    elif kind == "directory":
        place.mkdir()
    else:
        place.write_bytes(b"x")
    with pytest.raises((PageCorruptError, TierIOError), match=place.name):
        reopen(root)
    place.rmdir() if kind == "directory" else place.unlink()
    reopen(root).close()


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b"x" * 70_000, b'{"format": 99}', b'{"format": 1, "uuid": "zz"}', b"\xff\xfe"],
)
def test_a_hostile_store_file_is_an_error(root, content):
    (root / "STORE").write_bytes(content)
    with pytest.raises((PageCorruptError, ConfigError), match="STORE"):
        reopen(root)


def test_a_store_file_with_impossible_numbers_is_an_error(root):
    store = json.loads((root / "STORE").read_text())
    for field, value in (
        ("epoch", -1),
        ("epoch", 1 << 70),
        ("next_sequence", "1"),
        ("uuid", "00"),
        ("drives", 7),
    ):
        (root / "STORE").write_text(json.dumps({**store, field: value}))
        with pytest.raises((PageCorruptError, ConfigError)):
            reopen(root)


def test_modes_and_names_give_nothing_away(root):
    assert (root / "drive0").stat().st_mode & 0o777 == 0o700
    assert (root / "index").stat().st_mode & 0o777 == 0o700
    for path in [*root.rglob("*.seg"), root / "STORE", root / "LOCK", root / "index" / "data.mdb"]:
        assert path.stat().st_mode & 0o777 == 0o600, path
    assert all(path.stem.isdigit() for path in (root / "drive0").iterdir())


def test_a_file_in_place_of_the_directory_is_an_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="not a directory"):
        DiskTier(tmp_path / "file", CAPACITY)


def test_scratch_never_wipes_pages_that_were_meant_to_stay(root):
    with pytest.raises(ConfigError, match="outlive a process"):
        DiskTier(root, CAPACITY)
    tier = reopen(root)
    assert check_hit(tier, 1)
    tier.close()


def test_scratch_leaves_nothing_and_reclaims_after_a_crash(tmp_path):
    code = (
        "import os, sys; from disk_pages import *\n"
        "tier = DiskTier(sys.argv[1], 16 * MIB)\n"
        "[put(tier, n) for n in range(5)]\n"
        "os._exit(0)"
    )
    run_python(code, tmp_path)
    assert list((tmp_path / "drive0").iterdir())
    tier = DiskTier(tmp_path, CAPACITY)
    assert not any(check_hit(tier, number) for number in range(5))
    assert list((tmp_path / "drive0").iterdir()) == []
    slot = put(tier, 1)
    get(tier, slot, 1)
    tier.close()
    assert list((tmp_path / "drive0").iterdir()) == []


def test_records_nobody_asks_for_give_way(tmp_path):
    tier = reopen(tmp_path)
    for number in range(14):
        put(tier, number, MIB)
    tier.close()
    tier = reopen(tmp_path)
    assert check_hit(tier, 0)  # asked for: stays
    for number in range(20, 30):
        put(tier, number, MIB)
    assert check_hit(tier, 0)
    assert not check_hit(tier, 1)
    assert tier.stats()["evicted_unclaimed"] > 0
    assert all(check_hit(tier, number) for number in range(20, 30))
    tier.close()


def test_records_let_go_stay_until_room_is_needed(tmp_path):
    tier = reopen(tmp_path)
    slots = {number: put(tier, number, MIB) for number in range(12)}
    with pytest.raises(TierFullError):
        tier.reserve(5 * MIB)
    assert tier.spare_bytes == 0
    for slot in slots.values():
        tier.let_go(slot)
    assert tier.spare_bytes == tier.used_bytes > 12 * MIB
    again, _ = tier.lookup(key_of(0).digest)  # claimed once more
    with pytest.raises(PageStateError):
        tier.let_go(slots[1])  # nobody claims it
    with pytest.raises(TierFullError):
        tier.reserve(8 * MIB)  # never waits for the index
    assert tier.make_room(8 * MIB, timeout_s=5)
    tier.free(tier.reserve(8 * MIB))
    get(tier, again, 0)
    assert [number for number in range(1, 12) if check_hit(tier, number)] == [9, 10, 11]
    assert not tier.make_room(15 * MIB, timeout_s=5)
    tier.check_integrity()
    tier.close()


def test_a_record_is_replaced_by_a_newer_one_of_its_key(tmp_path):
    tier = reopen(tmp_path)
    for _ in range(40):
        tier.let_go(put(tier, 1, MIB))
        tier.flush()
    assert len(tier.core.records()) == 1
    assert tier.used_bytes == tier.spare_bytes == MIB + 4096
    assert check_hit(tier, 1)
    held, _ = tier.lookup(key_of(1).digest)
    put(tier, 1, MIB)
    get(tier, held, 1)  # a claim outlives the newer record
    tier.close()
    tier = reopen(tmp_path)
    assert len(tier.core.records()) == 1
    assert check_hit(tier, 1)
    tier.close()


def test_hits_and_age_are_kept(root):
    tier = reopen(root)
    assert check_hit(tier, 1)
    assert check_hit(tier, 1)
    tier.close()
    entries = {entry.meta.digest: entry for entry in DiskReader(root).entries()}
    assert entries[key_of(1).digest].hits == 2
    assert entries[key_of(0).digest].hits == 0
    assert entries[key_of(1).digest].meta.key == key_of(1)
    assert entries[key_of(1).digest].created_ns > 1_600_000_000 * 10**9
