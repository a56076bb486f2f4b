"""The contenders of bench/disk.py: fio's engines, our disk tier, and other ways to keep a page on disk."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from tiercache.entry import PageKey
from tiercache.tiers.base import PageMeta, Slot
from tiercache.tiers.disk import DiskTier

FIO_ENGINES = ("io_uring", "libaio", "psync")
DEPTH = 8  # blocks in flight, for every contender


def require_fio() -> str:
    """Path of fio, or an end with the way to get it."""
    found = shutil.which("fio")
    if found is None:
        raise SystemExit("bench/disk.py compares with fio, which is not installed: apt-get install -y fio")
    return found


def fio(folder: Path, *, write: bool, block: int, total: int, engine: str) -> float:
    """Bytes a second of one fio run over a file that was written before, O_DIRECT, incompressible data."""
    jobs = DEPTH if engine == "psync" else 1
    command = [
        require_fio(),
        "--name=disk",
        f"--filename={folder / 'fio.dat'}",
        f"--rw={'write' if write else 'read'}",
        f"--bs={block}",
        f"--filesize={total}",
        f"--size={total // jobs}",
        f"--ioengine={engine}",
        f"--iodepth={1 if engine == 'psync' else DEPTH}",
        f"--numjobs={jobs}",
        f"--offset_increment={total // jobs}",
        "--thread",
        "--direct=1",
        "--overwrite=1",
        "--refill_buffers=0",
        "--buffer_compress_percentage=0",
        "--group_reporting",
        "--output-format=json",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    job = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]
    return float(job["write" if write else "read"]["bw_bytes"])


def aligned(num_bytes: int, seed: int) -> np.ndarray:
    """Random bytes on a block boundary, as the host tier's slots are."""
    memory = np.empty(num_bytes + 4096, np.uint8)
    start = -memory.ctypes.data % 4096
    data = memory[start : start + num_bytes]
    data[:] = np.random.default_rng(seed).integers(0, 256, num_bytes, dtype=np.uint8)
    return data


def meta_of(number: int, block: int, *, persistent: bool = False) -> PageMeta:
    """The record's own description."""
    key = PageKey(number.to_bytes(32, "little"), 0, "key")
    return PageMeta(key.digest, bytes(32), "uint8", (block,), "raw", block, block, key, persistent)


class Ours:
    """Our disk tier with `total` bytes of records of one size, read and written by DEPTH callers."""

    def __init__(self, folder: Path, *, block: int, total: int, engine: str = "auto") -> None:
        self.block = block
        self.metas = [meta_of(number, block) for number in range(total // block)]
        capacity_bytes = total + (total // block) * 4096 + (64 << 20)
        self.tier = DiskTier(folder, capacity_bytes, engine=engine, segment_bytes=512 << 20, depth=16)
        self.slots: list[Slot] = []
        self.pool = ThreadPoolExecutor(DEPTH)
        self.data = [aligned(block, seed) for seed in range(DEPTH)]
        self.write()  # files written first

    def _each(self, work: Any) -> float:
        """Bytes a second of `work(caller, numbers)` by all callers."""
        started = time.perf_counter()
        shares = [range(caller, len(self.metas), DEPTH) for caller in range(DEPTH)]
        for done in [self.pool.submit(work, caller, share) for caller, share in enumerate(shares)]:
            done.result()
        return self.block * len(self.metas) / (time.perf_counter() - started)

    def write(self) -> float:
        """Puts every record anew: reserve and write, checksums included."""
        for slot in self.slots:
            self.tier.free(slot)
        made: dict[int, Slot] = {}

        def work(caller: int, numbers: range) -> None:
            for number in numbers:
                made[number] = self.tier.reserve(self.block)
                self.tier.write(made[number], self.data[caller], self.metas[number])

        speed = self._each(work)
        self.slots = [made[number] for number in range(len(self.metas))]
        return speed

    def read(self) -> float:
        """Reads and proves every record."""

        def work(caller: int, numbers: range) -> None:
            for number in numbers:
                self.tier.read(self.slots[number], self.data[caller], self.metas[number])

        return self._each(work)

    def close(self) -> None:
        """Removes the files."""
        self.pool.shutdown()
        self.tier.close()


def safetensors_files(folder: Path, *, block: int, count: int) -> tuple[float, float]:
    """A file a page through safetensors: write and read speed."""
    from safetensors.numpy import load_file, save_file

    pages = [aligned(block, seed) for seed in range(4)]
    started = time.perf_counter()
    for number in range(count):
        save_file({"page": pages[number % 4]}, folder / f"{number}.safetensors")
    os.sync()
    written = time.perf_counter() - started
    for number in range(count):
        _drop_cache(folder / f"{number}.safetensors")
    started = time.perf_counter()
    for number in range(count):
        load_file(folder / f"{number}.safetensors")
    return count * block / written, count * block / (time.perf_counter() - started)


def lmdb_values(folder: Path, *, block: int, count: int) -> tuple[float, float]:
    """Pages as LMDB values: write and read speed."""
    import lmdb

    pages = [aligned(block, seed).tobytes() for seed in range(4)]
    with lmdb.open(str(folder / "lmdb"), map_size=4 * count * block, sync=False) as env:
        started = time.perf_counter()
        for number in range(count):
            with env.begin(write=True) as txn:
                txn.put(number.to_bytes(8, "big"), pages[number % 4])
        env.sync(force=True)
        written = time.perf_counter() - started
    _drop_cache(folder / "lmdb" / "data.mdb")
    with lmdb.open(str(folder / "lmdb"), map_size=4 * count * block, readonly=True) as env:
        started = time.perf_counter()
        for number in range(count):
            with env.begin(buffers=True) as txn:
                bytes(txn.get(number.to_bytes(8, "big")))
        return count * block / written, count * block / (time.perf_counter() - started)


def deepspeed_aio(folder: Path, *, block: int, count: int) -> tuple[float, float] | None:
    """DeepSpeed's AIO handle; None where it isn't installed or can't be built."""
    if importlib.util.find_spec("deepspeed") is None:
        return None
    import torch
    from deepspeed.ops.op_builder import AsyncIOBuilder

    if not AsyncIOBuilder().is_compatible():
        return None
    # block size, depth, one submission at a time, overlapped events, threads
    settings = (1 << 20, DEPTH, False, True, 1)
    try:
        handle = AsyncIOBuilder().load().aio_handle(*settings)  # compiled at the first use
    except RuntimeError as error:
        print(f"DeepSpeed's AIO handle could not be compiled: {error}")
        return None
    page = torch.from_numpy(aligned(block, 1))
    started = time.perf_counter()
    for number in range(count):
        handle.sync_pwrite(page, str(folder / f"{number}.aio"))
    written = time.perf_counter() - started
    started = time.perf_counter()
    for number in range(count):
        handle.sync_pread(page, str(folder / f"{number}.aio"))
    return count * block / written, count * block / (time.perf_counter() - started)


def _drop_cache(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(handle)
