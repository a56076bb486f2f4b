"""Power cuts: the write log of a run is cut at a random instant, and what was not synced is torn and shuffled.

What the model of the drive keeps: a write that had completed before a sync of its file began which completed before the
cut. Of every other write each 4 KiB block is there or not, and blocks of different writes land in any order. The index
(LMDB, synced) keeps every commit that returned, and the one in progress or not. New files are synced before their first
record. With durability "process" nothing is synced, and the index is torn away half of the time.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import lmdb
import numpy as np
import pytest
from disk_pages import MIB, data_of, key_of, meta_of, put, size_of

from tiercache.errors import PageCorruptError
from tiercache.tiers.disk import DiskTier
from tiercache.tiers.disk_index import index_crc, sequence_of
from tiercache.tiers.disk_journal import changes_of

CAPACITY = 2 * MIB
PAGES = 24


@pytest.fixture
def tmp_path(tmp_path) -> Iterator[Path]:
    """In memory where there is a place for that: the cuts are simulated, so real syncs prove nothing."""
    shared = Path("/dev/shm")
    if not os.access(shared, os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir=shared) as folder:
        yield Path(folder)


def record(root: Path, seed: int, durability: str) -> list[tuple[str, int, int, int, bytes]]:
    """A run's log. Mark "acknowledged" carries the pages that a flush has promised, "removing" those about to go."""
    rng = random.Random(seed)
    tier = DiskTier(root, CAPACITY, durability=durability, segment_bytes=MIB // 2, log=True)
    live: set[int] = set()
    for _ in range(60):
        number = rng.randrange(PAGES)
        if number in live or len(live) > 10:
            gone = number if number in live else rng.choice(sorted(live))
            tier.core.mark_log("removing", gone.to_bytes(4, "little"))
            tier.remove(key_of(gone).digest)
            live.discard(gone)
        if number not in live:
            put(tier, number, size_of(number, 60_000))
            live.add(number)
        if rng.random() < 0.3:
            tier.flush()
            tier.core.mark_log("acknowledged", b"".join(n.to_bytes(4, "little") for n in sorted(live)))
    tier.flush()
    log = tier.core.take_log()
    tier.close()
    return log


class Cut:
    """State of the drive and of the promises at one instant of a log."""

    def __init__(self, log: list[tuple[str, int, int, int, bytes]], instant: int) -> None:
        self.durable: list[tuple[int, int, bytes]] = []
        self.loose: list[tuple[int, int, bytes]] = []
        self.commits: list[list] = []
        self.promised: set[int] = set()
        self.committing: list | None = None
        writes: dict[int, tuple[int, int, bytes]] = {}
        done: dict[int, set[int]] = {}
        syncs: dict[int, tuple[int, set[int]]] = {}
        safe: set[int] = set()
        for what, request, segment, offset, content in log[:instant]:
            if what == "write":
                writes[request] = (segment, offset, content)
            elif what == "done":
                done.setdefault(writes[request][0], set()).add(request)
            elif what == "sync":
                syncs[request] = (segment, set(done.get(segment, ())))
            elif what == "synced":
                safe |= syncs[request][1]
            elif what == "commit":
                self.committing = changes_of(content)
            elif what == "committed":
                self.commits.append(self.committing or [])
                self.committing = None
            else:
                pages = {int.from_bytes(content[i : i + 4], "little") for i in range(0, len(content), 4)}
                self.promised = pages if what == "acknowledged" else self.promised - pages
        for request, write in writes.items():
            (self.durable if request in safe else self.loose).append(write)


def rebuild_drive(root: Path, template: Path, cut: Cut, rng: random.Random, *, keep_index: bool) -> None:
    """Lays out the files as the cut left them."""
    shutil.copytree(template, root)
    handles = {int(path.stem): os.open(path, os.O_RDWR) for path in (root / "drive0").iterdir()}
    for segment, offset, content in cut.durable:
        os.pwrite(handles[segment], content, offset)
    blocks = [
        (segment, offset + at, content[at : at + 4096])
        for segment, offset, content in cut.loose
        for at in range(0, len(content), 4096)
        if rng.random() < 0.5
    ]
    rng.shuffle(blocks)
    for segment, offset, content in blocks:
        os.pwrite(handles[segment], content, offset)
    for handle in handles.values():
        os.close(handle)
    commits = [*cut.commits, *([cut.committing] if cut.committing and rng.random() < 0.5 else [])]
    if not keep_index:
        return
    (root / "index").mkdir(mode=0o700)
    with lmdb.open(str(root / "index"), map_size=16 << 20, sync=False) as env, env.begin(write=True) as txn:
        for digest, sequence, value in (change for commit in commits for change in commit):
            known = txn.get(digest)
            if value is not None:
                txn.put(digest, value)
            elif known is not None and sequence_of(known) == sequence:
                txn.delete(digest)
    # As after a clean close, which spares the walk of the index by a child process.
    store = json.loads((root / "STORE").read_text())
    (root / "STORE").write_text(json.dumps({**store, "index_crc": index_crc(root / "index")}))


def template_of(root: Path, target: Path) -> None:
    """The store's files without content: headers of segments, STORE as a writer that never closed left it."""
    (target / "drive0").mkdir(parents=True)
    for path in (root / "drive0").iterdir():
        with path.open("rb") as source, (target / "drive0" / path.name).open("wb") as made:
            made.write(source.read(4096))
            made.truncate(path.stat().st_size)
    shutil.copy(root / "STORE", target / "STORE")


def survive(root: Path, durability: str, promised: set[int]) -> int:
    """Opens what the cut left. Every hit is right; what was promised is a hit; no byte leaks. Returns hits."""
    tier = DiskTier(root, CAPACITY, durability=durability, segment_bytes=MIB // 2, engine="threads")
    hits = 0
    try:
        for number in range(PAGES):
            found = tier.lookup(key_of(number).digest)
            if found is None:
                assert number not in promised, f"page {number} was promised and has no entry"
                continue
            slot, meta = found
            num_bytes = size_of(number, 60_000)
            assert meta == meta_of(number, num_bytes)
            out = np.empty(num_bytes, np.uint8)
            try:
                tier.read(slot, out, meta)
            except PageCorruptError:
                assert number not in promised, f"page {number} was promised and is damaged"
                tier.free(slot)
                continue
            assert np.array_equal(out, data_of(number, num_bytes)), f"page {number} has other bytes"
            hits += 1
        tier.check_integrity()
        put(tier, 500, 5000)
    finally:
        tier.close()
    return hits


def cut_many(tmp_path: Path, seeds: range, durability: str, *, promises: bool = True) -> tuple[int, int]:
    hits = promised = 0
    for run in range(seeds.start, seeds.stop, 50):
        source, template = tmp_path / f"run{run}", tmp_path / f"template{run}"
        log = record(source, run, durability)
        template_of(source, template)
        for seed in range(run, min(run + 50, seeds.stop)):
            rng = random.Random(seed)
            cut = Cut(log, rng.randrange(len(log) + 1))
            root = tmp_path / "cut"
            rebuild_drive(root, template, cut, rng, keep_index=durability == "power" or rng.random() < 0.5)
            if not promises:
                cut.promised = set()
            hits += survive(root, durability, cut.promised)
            promised += len(cut.promised)
            shutil.rmtree(root)
    return hits, promised


def test_a_thousand_power_cuts(tmp_path):
    hits, promised = cut_many(tmp_path, range(1000), "power")
    assert hits >= promised > 2000


def test_power_cuts_where_nothing_is_synced_cost_only_misses(tmp_path):
    """Only a killed process is promised anything there."""
    hits, _ = cut_many(tmp_path, range(5000, 5100), "process", promises=False)
    assert hits > 0


def test_the_model_notices_a_missing_sync(tmp_path):
    with pytest.raises(AssertionError, match=r"promised and (is damaged|has no entry)"):
        cut_many(tmp_path, range(5000, 5050), "process")


@pytest.mark.long
@pytest.mark.parametrize("part", range(4))
def test_many_more_power_cuts(tmp_path, part):
    first = 10_000 * (part + 1)
    hits, promised = cut_many(tmp_path, range(first, first + 2000), "power")
    assert hits >= promised > 4000
