"""Whoever can put files in the store's place: an error or a miss, never their bytes, a hang, or a write elsewhere."""

from __future__ import annotations

import os
import shutil
import struct
from pathlib import Path

import lmdb
import numpy as np
import pytest
from disk_pages import MIB, check_hit, key_of, meta_of, only_segment, put
from typer.testing import CliRunner

from tiercache import _core
from tiercache.cli.store_command import app
from tiercache.errors import ConfigError, PageCorruptError, TierIOError
from tiercache.tiers.disk import DiskTier
from tiercache.tiers.disk_reader import DiskReader

CAPACITY = 16 * MIB
SECRET = b"x" * 8192
HUGE = (0, 1 << 31, 1 << 32, (1 << 63) - 1, 1 << 63, (1 << 64) - 4096, (1 << 64) - 1)


def reopen(root: Path, capacity_bytes: int = CAPACITY, **options: object) -> DiskTier:
    return DiskTier(root, capacity_bytes, **{"durability": "process", **options})


@pytest.fixture
def root(tmp_path):
    """A store with pages 0 to 4, closed."""
    root = tmp_path / "store"
    tier = reopen(root)
    for number in range(5):
        put(tier, number)
    tier.close()
    return root


@pytest.fixture
def secret(tmp_path):
    """A file that must not be written to."""
    path = tmp_path / "secret"
    path.write_bytes(SECRET)
    yield path
    assert path.read_bytes() == SECRET


def is_hit(tier: DiskTier, number: int) -> bool:
    """As check_hit, where a record may lie about what its payload is: then its bytes must not come back."""
    found = tier.lookup(key_of(number).digest)
    if found is None or found[1] == meta_of(number, found[0].num_bytes):
        return check_hit(tier, number)
    slot, meta = found
    with pytest.raises((PageCorruptError, MemoryError)):
        tier.read(slot, np.empty(min(meta.stored_bytes, MIB), np.uint8), meta_of(number, slot.num_bytes))
    return False


def remove(place: Path) -> None:
    if place.is_dir() and not place.is_symlink():
        shutil.rmtree(place)
    else:
        place.unlink(missing_ok=True)


def plant(place: Path, kind: str, secret: Path) -> None:
    remove(place)
    if kind == "symlink":
        place.symlink_to(secret)
    elif kind == "fifo":
        os.mkfifo(place)
    elif kind == "directory":
        place.mkdir()
    else:
        place.write_bytes(b"x" * 9000)


@pytest.mark.parametrize("kind", ["symlink", "fifo", "directory", "file"])
@pytest.mark.parametrize("name", ["index", "index/data.mdb", "index/lock.mdb"])
def test_what_lies_in_the_place_of_the_index_is_replaced_from_the_segments(root, secret, name, kind):
    plant(root / name, kind, secret)
    if kind != "file":
        done = CliRunner().invoke(app, ["ls", str(root), "--json"])  # an error or nothing, but an end
        assert done.exit_code == 1 or done.output == "[]\n"
    tier = reopen(root)
    assert all(check_hit(tier, number) for number in range(5))
    tier.close()


def test_an_index_elsewhere_is_not_used(root, tmp_path):
    other = tmp_path / "other"
    shutil.move(root / "index", other)
    before = (other / "data.mdb").read_bytes()
    (root / "index").symlink_to(other)
    tier = reopen(root)
    assert all(check_hit(tier, number) for number in range(5))
    put(tier, 7)
    tier.close()
    assert (other / "data.mdb").read_bytes() == before


@pytest.mark.parametrize("kind", ["symlink", "fifo", "directory", "file"])
@pytest.mark.parametrize("name", ["STORE", "LOCK", "drive0", "drive0/0001.seg", "drive0/0009.seg"])
def test_what_lies_in_the_place_of_a_file_is_an_error_or_a_miss(root, secret, name, kind):
    plant(root / name, kind, secret)
    said = ""
    try:
        tier = reopen(root)
    except (ConfigError, PageCorruptError, TierIOError) as error:
        said = str(error)
    if said:
        assert Path(name).name in said
        return
    assert kind in ("file", "directory")
    hits = [check_hit(tier, number) for number in range(5)]
    assert not any(hits) or name in ("LOCK", "drive0/0009.seg")
    tier.close()


@pytest.mark.parametrize(
    "name", ["1.seg", "00001.seg", "0001.SEG", "0001.seg ", "-001.seg", "0001.seg.seg", "x"]
)
def test_names_that_are_no_numbers_are_an_error(root, name):
    (root / "drive0" / name).write_bytes(b"x")
    with pytest.raises(PageCorruptError, match="no segment file"):
        reopen(root)


@pytest.mark.parametrize(
    ("name", "mode", "refused"),
    [
        ("", 0o777, True),
        ("", 0o1777, False),  # as /tmp is: only owners can replace files
        ("", 0o755, False),
        ("drive0", 0o777, True),
        ("drive0", 0o770, True),
        ("drive0", 0o1777, True),
        ("index", 0o777, False),  # made anew
    ],
)
def test_directories_that_others_may_write_to(root, name, mode, refused):
    (root / name).chmod(mode)
    if refused:
        with pytest.raises(ConfigError, match=f"others may write to.*{mode:04o}.*chmod"):
            reopen(root)
        return
    tier = reopen(root)
    assert all(check_hit(tier, number) for number in range(5))
    tier.close()
    assert (root / "index").stat().st_mode & 0o777 == 0o700


def sealed(value: bytearray) -> bytes:
    """An entry of the index with a valid checksum."""
    value[316:320] = bytes(4)
    value[316:320] = struct.pack("<I", _core.crc32c(np.frombuffer(bytes(value), np.uint8)))
    return bytes(value)


@pytest.mark.parametrize("field", ["raw bytes", "stored bytes", "offset", "segment", "dimensions", "a size"])
def test_an_index_with_valid_checksums_and_wild_numbers_costs_only_misses(root, field):
    at, form = {
        "raw bytes": (104, "<Q"),
        "stored bytes": (112, "<Q"),
        "offset": (288, "<Q"),
        "segment": (296, "<I"),
        "dimensions": (208, "<I"),
        "a size": (136, "<Q"),
    }[field]
    for number in HUGE:
        with lmdb.open(str(root / "index")) as env, env.begin(write=True) as txn:
            for key, entry in list(txn.cursor()):
                value = bytearray(entry)
                struct.pack_into(form, value, at, number % (1 << 8 * struct.calcsize(form)))
                txn.put(key, sealed(value))
        reader = DiskReader(root)
        for entry in reader.entries():
            with (
                pytest.raises((PageCorruptError, TierIOError, LookupError)),
                reader.lease(entry.meta.digest) as lease,
            ):
                lease.read()
        reader.close()
        tier = reopen(root)
        assert not any(is_hit(tier, page) for page in range(5))
        tier.check_integrity()
        tier.close()
        reopen(root, rebuild=lambda done, total: None).close()


@pytest.mark.parametrize("field", ["raw bytes", "stored bytes", "chunks", "log of a chunk", "dimensions"])
def test_a_record_with_a_valid_checksum_and_wild_numbers_is_a_miss(root, field):
    segment = only_segment(root)
    at, form = {
        "raw bytes": (144, "<Q"),
        "stored bytes": (152, "<Q"),
        "chunks": (324, "<I"),
        "log of a chunk": (320, "<I"),
        "dimensions": (248, "<I"),
    }[field]
    uuid = bytes.fromhex(DiskReader(root).store.uuid)
    offset = next(entry.offset for entry in DiskReader(root).entries())
    good = segment.read_bytes()
    for number in HUGE:
        content = bytearray(good)
        header = memoryview(content)[offset : offset + 4096]
        struct.pack_into(form, header, at, number % (1 << 8 * struct.calcsize(form)))
        header[12:16] = bytes(4)
        proof = np.frombuffer(uuid + bytes(header[16:40]) + bytes(header), np.uint8)
        header[12:16] = struct.pack("<I", _core.crc32c(proof))
        segment.write_bytes(content)
        tier = reopen(root, rebuild=lambda done, total: None)
        assert sum(is_hit(tier, page) for page in range(5)) == 4
        tier.check_integrity()
        tier.close()


def test_a_segment_that_claims_more_than_the_budget_does_not_get_it(root):
    segment = only_segment(root)
    content = bytearray(segment.read_bytes()[:4096])
    struct.pack_into("<Q", content, 40, 1 << 40)
    content[12:16] = bytes(4)
    content[12:16] = struct.pack("<I", _core.crc32c(np.frombuffer(bytes(content), np.uint8)))
    with segment.open("r+b") as file:
        file.write(content)
        file.truncate(1 << 40)  # sparse
    tier = reopen(root, rebuild=lambda done, total: None)
    assert tier.stats()["file_bytes"] == 0
    assert not segment.exists()
    assert "budget" in tier.refused_files[0]
    put(tier, 1)
    tier.check_integrity()
    tier.close()


def test_a_smaller_budget_holds_from_the_start(tmp_path):
    tier = reopen(tmp_path, 64 * MIB, segment_bytes=4 * MIB)
    for number in range(48):
        put(tier, number, MIB)
    tier.close()
    tier = reopen(tmp_path, 20 * MIB)
    assert tier.stats()["file_bytes"] <= 20 * MIB
    assert tier.used_bytes <= tier.capacity_bytes
    tier.check_integrity()
    hits = [number for number in range(48) if check_hit(tier, number)]
    assert 9 <= len(hits) < 48
    assert hits[-1] == 47  # the newest stay
    tier.close()
