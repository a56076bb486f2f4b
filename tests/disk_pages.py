"""Pages for tests of the disk tier: content follows from a number, so that any process can check any page."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

from tiercache.entry import PageKey
from tiercache.errors import PageCorruptError
from tiercache.tiers.base import PageMeta, Slot
from tiercache.tiers.disk import DiskTier

MIB = 1 << 20
NAMESPACE = bytes(range(32))


def key_of(number: int) -> PageKey:
    return PageKey(hashlib.blake2b(str(number).encode(), digest_size=32).digest(), number % 48, "key")


def data_of(number: int, num_bytes: int) -> np.ndarray:
    """Bytes of page `number`: start on a block boundary, as the host tier's do."""
    memory = np.empty(num_bytes + 4096, np.uint8)
    start = -memory.ctypes.data % 4096
    data = memory[start : start + num_bytes]
    data[:] = np.random.default_rng(number).integers(0, 256, num_bytes, dtype=np.uint8)
    return data


def size_of(number: int, most: int = 200_000) -> int:
    """A size that follows from the number: some tiny, some odd, some whole blocks."""
    digest = hashlib.blake2b(str(number).encode(), digest_size=8).digest()
    value = int.from_bytes(digest, "little")
    return (1 + value % 9000, 4096 * (1 + value % 20), 1 + value % most)[value % 3]


def meta_of(number: int, num_bytes: int, *, persistent: bool = True) -> PageMeta:
    key = key_of(number)
    return PageMeta(
        key.digest, NAMESPACE, "uint8", (num_bytes,), "raw", num_bytes, num_bytes, key, persistent
    )


def put(tier: DiskTier, number: int, num_bytes: int | None = None, *, persistent: bool = True) -> Slot:
    num_bytes = size_of(number) if num_bytes is None else num_bytes
    tier.make_room(num_bytes, timeout_s=5)
    slot = tier.reserve(num_bytes)
    try:
        tier.write(slot, data_of(number, num_bytes), meta_of(number, num_bytes, persistent=persistent))
    except BaseException:
        tier.free(slot)
        raise
    return slot


def get(tier: DiskTier, slot: Slot, number: int, *, persistent: bool = True) -> None:
    """Reads and compares every byte."""
    out = np.empty(slot.num_bytes, np.uint8)
    tier.read(slot, out, meta_of(number, slot.num_bytes, persistent=persistent))
    assert np.array_equal(out, data_of(number, slot.num_bytes)), f"page {number} has other bytes"


def check_hit(tier: DiskTier, number: int) -> bool:
    """Whether page `number` is found; what is found must be right. A corrupt record is a miss."""
    found = tier.lookup(key_of(number).digest)
    if found is None:
        return False
    slot, meta = found
    assert meta == meta_of(number, slot.num_bytes)
    try:
        get(tier, slot, number)
    except PageCorruptError:
        return False
    return True


def only_segment(root: Path) -> Path:
    (segment,) = (root / "drive0").glob("*.seg")
    return segment


def flip(path: Path, byte: int, bit: int) -> None:
    handle = os.open(path, os.O_RDWR)
    value = os.pread(handle, 1, byte)[0] ^ (1 << bit)
    os.pwrite(handle, bytes([value]), byte)
    os.close(handle)


def environment() -> dict[str, str]:
    """Of a fresh interpreter with these tests importable, behind what this one was told to look through first."""
    told = os.environ.get("PYTHONPATH")
    path = os.pathsep.join([*([told] if told else []), str(Path(__file__).parent)])
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}


def run_python(
    code: str, *args: Any, prefix: tuple[str, ...] = (), check: bool = True, timeout_s: float = 120
) -> str:
    """Standard output of a fresh interpreter that runs `code` with these tests importable."""
    done = subprocess.run(
        [*prefix, sys.executable, "-c", code, *map(str, args)],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    if check and done.returncode != 0:
        raise AssertionError(f"child ended with {done.returncode}:\n{done.stdout}\n{done.stderr}")
    return done.stdout
