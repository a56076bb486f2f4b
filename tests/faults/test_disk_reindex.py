"""An index that is made anew: a process may end at any step, and no record goes missing."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path

import pytest
from disk_pages import MIB, check_hit, key_of, put, run_python

from tiercache.errors import PageCorruptError, TierIOError
from tiercache.tiers import disk_index_files, disk_reader
from tiercache.tiers.disk import DiskTier
from tiercache.tiers.disk_index import DiskIndex
from tiercache.tiers.disk_reader import DiskReader

COUNT = 5

# Ends at the N-th call that changes a folder or the index, before or after the call itself.
KILLED = """
import os, shutil, signal, sys
import lmdb
from pathlib import Path
from disk_pages import MIB
from tiercache.tiers import disk
from tiercache.tiers.disk_index import DiskIndex

root, last, anew = sys.argv[1], int(sys.argv[2]), sys.argv[3] == "anew"
calls = 0

def at(name, call):
    def made(*args, **options):
        global calls
        for when in ("before", "after"):
            calls += 1
            if calls == last:
                print(when, name, flush=True)
                os.kill(os.getpid(), signal.SIGKILL)
            if when == "before":
                found = call(*args, **options)
        return found
    return made

for home, name in [
    (Path, "rename"), (Path, "unlink"), (Path, "mkdir"), (shutil, "rmtree"), (lmdb, "open"), (DiskIndex, "apply")
]:
    setattr(home, name, at(name, getattr(home, name)))
tier = disk.DiskTier(root, 16 * MIB, durability="process", rebuild=(lambda done, total: None) if anew else None)
tier.close()
print("end", flush=True)
"""


@pytest.fixture
def root(tmp_path):
    tier = DiskTier(tmp_path, 16 * MIB, durability="process")
    for number in range(COUNT):
        put(tier, number)
    tier.close()
    return tmp_path


def another_boot(root: Path) -> None:
    store = json.loads((root / "STORE").read_text())
    (root / "STORE").write_text(json.dumps({**store, "boot_id": "of another boot", "index_crc": None}))


def damage(root: Path) -> None:
    (root / "index" / "data.mdb").write_bytes(b"x" * 9000)


def seen_by_a_reader(root: Path) -> int | None:
    """Records; None where it says that the index is damaged."""
    try:
        reader = DiskReader(root)
    except PageCorruptError:
        return None
    found = len(list(reader.entries()))
    reader.close()
    return found


@pytest.mark.parametrize(
    ("why", "seen"),
    [("rebuild", {COUNT}), ("another boot", {COUNT}), ("damaged", {None, COUNT}), ("gone", {0, COUNT})],
)
def test_an_end_at_any_step_of_making_the_index_anew_loses_no_record(root, tmp_path_factory, why, seen):
    ends = []
    while "end" not in ends:
        home = tmp_path_factory.mktemp("copy") / "store"
        shutil.copytree(root, home)
        if why == "another boot":
            another_boot(home)
        elif why == "damaged":
            damage(home)
        elif why == "gone":
            shutil.rmtree(home / "index")
        anew = "anew" if why == "rebuild" else ""
        ends.append(run_python(KILLED, home, len(ends) + 1, anew, check=False).strip())
        assert seen_by_a_reader(home) in seen, ends[-1]
        tier = DiskTier(home, 16 * MIB, durability="process")
        assert [check_hit(tier, number) for number in range(COUNT)] == [True] * COUNT, ends[-1]
        tier.check_integrity()
        tier.close()
        assert seen_by_a_reader(home) == COUNT, ends[-1]
        assert sorted(path.name for path in home.iterdir()) == ["LOCK", "STORE", "drive0", "index"], ends[-1]
        shutil.rmtree(home)
    assert {"after apply", "after rename", "before rmtree"} - set(ends) <= (
        {"before rmtree"} if why == "gone" else set()
    )


def test_an_end_in_the_first_open_leaves_a_store_that_opens(tmp_path):
    ends = []
    while "end" not in ends:
        home = tmp_path / str(len(ends))
        ends.append(run_python(KILLED, home, len(ends) + 1, "", check=False).strip())
        if (home / "STORE").exists():
            assert seen_by_a_reader(home) == 0, ends[-1]
        tier = DiskTier(home, 16 * MIB, durability="process")
        put(tier, 1)
        tier.close()
        assert seen_by_a_reader(home) == 1
    assert len(ends) > 10


def full(*_):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_an_index_that_cannot_be_finished_is_made_again(root, monkeypatch):
    """Its process goes on, and keeps what it has for itself; the next one finds everything."""
    damage(root)
    with monkeypatch.context() as patch:
        patch.setattr(DiskIndex, "apply", full)
        tier = DiskTier(root, 16 * MIB, durability="process", timeout_s=2)
        assert all(check_hit(tier, number) for number in range(COUNT))
        tier.close()
    assert not (root / "index").exists()
    tier = DiskTier(root, 16 * MIB, durability="process")
    assert all(check_hit(tier, number) for number in range(COUNT))
    assert tier.lookup(key_of(COUNT).digest) is None
    tier.close()
    assert seen_by_a_reader(root) == COUNT


@pytest.mark.parametrize("fault", ["sync", "leftovers"])
@pytest.mark.parametrize("durability", ["process", "power"])
def test_a_failure_after_the_index_got_its_name_loses_nothing(root, monkeypatch, fault, durability):
    """What is committed later is in the index that has the name."""
    tier = DiskTier(root, 16 * MIB, durability=durability)
    tier.close()
    damage(root)

    def fails(*_, **__):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        if fault == "sync":
            patch.setattr(disk_index_files, "sync_directory", fails)
        else:
            patch.setattr(shutil, "rmtree", fails)
        tier = DiskTier(root, 16 * MIB, durability=durability)
        put(tier, COUNT)
        tier.flush()
        tier.close()
    assert seen_by_a_reader(root) == COUNT + 1
    tier = DiskTier(root, 16 * MIB, durability=durability)
    assert all(check_hit(tier, number) for number in range(COUNT + 1))
    tier.close()
    assert sorted(path.name for path in root.iterdir()) == ["LOCK", "STORE", "drive0", "index"]


def test_a_store_without_an_index_leaves_such_folders_alone(tmp_path):
    for name in ("index", "index.old", "index.new"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "notes").write_text(name)
    DiskTier(tmp_path, 16 * MIB, durability="scratch").close()
    for name in ("index", "index.old", "index.new"):
        assert (tmp_path / name / "notes").read_text() == name


def test_a_deletion_that_is_committed_later_is_no_failure(root, monkeypatch):
    real, failures = DiskIndex.apply, []

    def once(self, changes):
        if not failures:
            failures.append(changes)
            full()
        real(self, changes)

    tier = DiskTier(root, 16 * MIB, durability="process")
    with monkeypatch.context() as patch:
        patch.setattr(DiskIndex, "apply", once)
        assert tier.remove(key_of(0).digest)
        tier.flush()
        assert failures
    tier.close()
    assert seen_by_a_reader(root) == COUNT - 1


def test_a_reader_that_meets_the_rename_opens_what_took_its_place(root, monkeypatch):
    """The folder moves between its look and its open."""
    real, moves = disk_reader.is_ours, []

    def moved(path):
        if not moves:
            moves.append(path)
            (root / "index").rename(root / "index.old")
            shutil.copytree(root / "index.old", root / "index")
        return real(path)

    monkeypatch.setattr(disk_reader, "is_ours", moved)
    assert seen_by_a_reader(root) == COUNT
    assert moves


def test_flush_tells_of_records_that_stay_out_of_the_index(tmp_path, monkeypatch):
    """Later commits that work don't bring them back: flush must not say that all is well."""
    tier = DiskTier(tmp_path, 16 * MIB, durability="process", timeout_s=5)
    with monkeypatch.context() as patch:
        patch.setattr(DiskIndex, "apply", full)
        put(tier, 1)
        tier.core.flush(5)
    put(tier, 2)
    with pytest.raises(TierIOError, match="No space left"):
        tier.flush()
    put(tier, 3)
    tier.flush()
    tier.close()
    tier = DiskTier(tmp_path, 16 * MIB, durability="process")
    assert [check_hit(tier, number) for number in (1, 2, 3)] == [False, True, True]
    tier.close()
