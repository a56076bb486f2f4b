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
import traceback
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


def crash_once(root: Path, seed: int, durability: str, kept: set[int]) -> tuple[set[int], int]:
    """One life, one kill, one reopening. Returns the pages that are there, and how many had to be.

    Args:
        kept: pages that were there when the life before this one ended.
    """
    rng = random.Random(seed)
    receive, send = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(receive)
            work_until_killed(root, seed, durability, send)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    os.close(send)
    said = b""
    if rng.random() < 0.15:  # while it opens the store
        time.sleep(rng.uniform(0, 0.05))
    else:  # after so much work, however fast the machine is just now
        work = 5 * rng.randrange(1, 60)
        while len(said) < work:
            block = os.read(receive, 1 << 16)
            assert block, "the child ended before it was killed"
            said += block
        time.sleep(rng.uniform(0, 0.02))
    os.kill(child, signal.SIGKILL)
    assert os.WIFSIGNALED(os.waitpid(child, 0)[1]), "the child ended before it was killed"
    while block := os.read(receive, 1 << 16):
        said += block
    os.close(receive)
    promised = set(kept)
    for what, number in struct.iter_unpack("<cI", said[: len(said) // 5 * 5]):
        if what != b"!":
            (promised.add if what == b"+" else promised.discard)(number)
    return check(root, durability, promised), len(promised)


def check(root: Path, durability: str, promised: set[int]) -> set[int]:
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
    return hits


def torture(root: Path, cycles: int, seed: int) -> str:
    """Many lives of one store. Returns the counts as text."""
    hits = promised = 0
    there: set[int] = set()
    for cycle in range(cycles):
        durability = ("process", "power")[cycle % 2]
        there, had_to = crash_once(root, seed + cycle, durability, there)
        hits, promised = hits + len(there), promised + had_to
    return f"{cycles} kills, {hits} hits compared, {promised} of them promised"


if __name__ == "__main__":
    import sys

    print(torture(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])))  # noqa: T201
