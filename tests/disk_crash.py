"""A child that works on a disk tier until it is killed, and the check of what it left.

The child is forked from a process that has imported everything, so that a cycle costs milliseconds. Before it deletes
or after it has flushed a page it says so on a pipe; what the pipe holds is what the survivor may count on.
"""

from __future__ import annotations

import os
import random
import signal
import struct
import time
from pathlib import Path

from disk_pages import MIB, check_hit, put, size_of

from tiercache.tiers.disk import DiskTier

CAPACITY = 24 * MIB
PAGES = 60


def work_until_killed(root: Path, seed: int, durability: str, pipe: int) -> None:
    """Puts, replaces and removes random pages. Says ("+", page) once a page is flushed, ("-", page) before it goes."""
    rng = random.Random(seed)
    tier = DiskTier(
        root, CAPACITY, durability=durability, segment_bytes=4 * MIB, engine=rng.choice(["auto", "threads"])
    )

    def say(what: bytes, number: int) -> None:
        os.write(pipe, struct.pack("<cI", what, number))

    from disk_pages import key_of

    say(b"!", 0)
    fresh: list[int] = []
    while True:
        number = rng.randrange(PAGES)
        if tier.lookup(key_of(number).digest) is not None:
            say(b"-", number)
            tier.remove(key_of(number).digest)
            fresh = [other for other in fresh if other != number]
        if rng.random() < 0.8:
            put(tier, number)
            fresh.append(number)
        if rng.random() < 0.2:
            scratch = put(tier, number + 1000, persistent=False)
            tier.free(scratch) if rng.random() < 0.5 else None
        if rng.random() < 0.3:
            tier.flush()
            for done in fresh:
                say(b"+", done)
            fresh.clear()


def crash_once(root: Path, seed: int, durability: str) -> tuple[int, int]:
    """One life, one kill, one reopening. Returns hits and pages that had to be there."""
    receive, send = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(receive)
            work_until_killed(root, seed, durability, send)
        finally:
            os._exit(1)
    os.close(send)
    first = os.read(receive, 5)
    assert first == struct.pack("<cI", b"!", 0), "the child did not come to work"
    time.sleep(random.Random(seed).uniform(0.002, 0.08))
    os.kill(child, signal.SIGKILL)
    assert os.WIFSIGNALED(os.waitpid(child, 0)[1]), "the child ended before it was killed"
    said = b""
    while block := os.read(receive, 1 << 16):
        said += block
    os.close(receive)
    promised: set[int] = set()
    for what, number in struct.iter_unpack("<cI", said[: len(said) // 5 * 5]):
        (promised.add if what == b"+" else promised.discard)(number)
    return check(root, durability, promised)


def check(root: Path, durability: str, promised: set[int]) -> tuple[int, int]:
    """Opens what is left: every hit is right, everything promised is there, no byte leaks."""
    tier = DiskTier(root, CAPACITY, durability=durability, segment_bytes=4 * MIB)
    try:
        hits = {number for number in range(PAGES) if check_hit(tier, number)}
        assert promised <= hits, f"pages {sorted(promised - hits)} were flushed and are gone"
        assert not any(check_hit(tier, number + 1000) for number in range(PAGES))
        expected = sum(4096 + -(-size_of(number) // 4096) * 4096 for number in hits)
        stats = tier.stats()
        assert stats["misses"] == {}, stats["misses"]
        assert tier.used_bytes == expected, "bytes leak"
        assert (
            sum(path.stat().st_size for path in (root / "drive0").iterdir())
            == stats["file_bytes"]
            <= CAPACITY
        )
        tier.check_integrity()
    finally:
        tier.close()
    return len(hits), len(promised)


def torture(root: Path, cycles: int, seed: int) -> str:
    """Many lives of one store. Returns the counts as text."""
    hits = promised = 0
    for cycle in range(cycles):
        durability = ("process", "power")[cycle % 2]
        got = crash_once(root, seed + cycle, durability)
        hits, promised = hits + got[0], promised + got[1]
    return f"{cycles} kills, {hits} hits compared, {promised} of them promised"


if __name__ == "__main__":
    import sys

    print(torture(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])))  # noqa: T201
