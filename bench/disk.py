"""The disk tier against the best of fio's engines, on the same directory.

    apt-get install -y fio
    python bench/disk.py --json FILE [--quick] [--dir DIR]

Every figure `*_ratio_*` is the median over interleaved pairs of our bytes a second over fio's: the same directory,
block size, blocks in flight and sync rule (none), O_DIRECT where it works, incompressible data, files written first
(reading preallocated but unwritten extents never touches the device). Ours puts and reads whole records with their
checksums; fio moves bare blocks. `fallback_ratio_4m` is the engine of threads over io_uring, both ours.

A last table has the same values through other ways, as far as they are installed. DeepSpeed's AIO handle wants

    apt-get install -y libaio-dev
    DS_BUILD_OPS=0 pip install --no-deps deepspeed && pip install hjson py-cpuinfo msgpack einops ninja

and compiles itself at its first use, for ten minutes of one core.
"""

from __future__ import annotations

import argparse
import json
import resource
import shutil
import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from disk_contenders import (
    FIO_ENGINES,
    Ours,
    aligned,
    deepspeed_aio,
    fio,
    lmdb_values,
    meta_of,
    require_fio,
    safetensors_files,
)
from machine import describe_machine

from tiercache import _core
from tiercache.tiers.disk import DiskTier

BLOCKS = {"4m": 4 << 20, "1m": 1 << 20, "256k": 256 << 10}
REACH = {
    "write_ratio_4m": 0.95,
    "read_ratio_4m": 0.95,
    "write_ratio_1m": 0.90,
    "read_ratio_1m": 0.90,
    "write_ratio_256k": 0.80,
    "read_ratio_256k": 0.80,
    "fallback_ratio_4m": 0.85,
    "crc_gbps": 8.0,
    "lookup_us": 3.0,
    "single_lookup_us": 3.0,
}


def cpu_s() -> float:
    """Processor seconds of this process and its threads so far."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def compare(folder: Path, block: int, total: int, pairs: int) -> dict[str, Any]:
    """Ratios of one block size, with both sides' speeds."""
    fio(folder, write=True, block=block, total=total, engine="psync")  # written first
    best = {}
    for write in (True, False):
        speeds = {
            engine: fio(folder, write=write, block=block, total=total, engine=engine)
            for engine in FIO_ENGINES
        }
        best[write] = max(speeds, key=lambda engine: speeds[engine])
    ours = Ours(folder / "ours", block=block, total=total)
    found: dict[str, Any] = {}
    for write in (True, False):
        act = ours.write if write else ours.read
        ratios, mine, theirs = [], [], []
        for pair in range(pairs):
            order = (0, 1) if pair % 2 == 0 else (1, 0)
            speed = [0.0, 0.0]
            for side in order:
                speed[side] = (
                    act()
                    if side == 0
                    else fio(folder, write=write, block=block, total=total, engine=best[write])
                )
            ratios.append(speed[0] / speed[1])
            mine.append(speed[0])
            theirs.append(speed[1])
        found["write" if write else "read"] = {
            "ratio": statistics.median(ratios),
            "ours_gbps": statistics.median(mine) / 1e9,
            "fio_gbps": statistics.median(theirs) / 1e9,
            "fio_engine": best[write],
            "ratios": [round(ratio, 3) for ratio in ratios],
        }
    found["rung"] = ours.tier.stats()["drives"][0]["rung"]
    ours.close()
    (folder / "fio.dat").unlink()
    return found


def fallback(folder: Path, total: int, pairs: int) -> tuple[float, float]:
    """Threads over io_uring at 4 MiB, and processor seconds a GB of the default engine."""
    block = BLOCKS["4m"]
    sides = [Ours(folder / name, block=block, total=total, engine=name) for name in ("threads", "auto")]
    ratios, moved, used = [], 0, 0.0
    for _ in range(pairs):
        for act in ("write", "read"):
            slow = getattr(sides[0], act)()
            before = cpu_s()
            fast = getattr(sides[1], act)()
            used += cpu_s() - before
            moved += total
            ratios.append(slow / fast)
    for side in sides:
        side.close()
    return statistics.median(ratios), used / (moved / 1e9)


def small_records(folder: Path, count: int) -> dict[str, float]:
    """Puts a second of 4 KiB records that outlive the process, index included; look-ups of 1,000 keys, each in
    microseconds, in one call as a store makes it and one by one.
    """
    tier = DiskTier(folder, (count + 4096) * 8192 + (64 << 20), durability="process")
    page = aligned(4096, 1)
    metas = [meta_of(number, 4096, persistent=True) for number in range(count)]

    def work(share: range) -> None:
        for number in share:
            tier.write(tier.reserve(4096), page, metas[number])

    with ThreadPoolExecutor(8) as pool:
        started = time.perf_counter()
        list(pool.map(work, [range(caller, count, 8) for caller in range(8)]))
        tier.flush()
        puts_per_s = count / (time.perf_counter() - started)
    digests = [metas[number * 7 % count].digest for number in range(1000)]
    many = min(_timed(lambda: tier.lookup_many(digests)) for _ in range(100))
    single = min(_timed(lambda: [tier.lookup(digest) for digest in digests]) for _ in range(100))
    tier.close()
    return {"puts_per_s": puts_per_s, "lookup_us": many * 1e3, "single_lookup_us": single * 1e3}


def _timed(act: Any) -> float:
    started = time.perf_counter()
    act()
    return time.perf_counter() - started


def crc_gbps() -> float:
    """CRC32C of 4 MiB by one core."""
    page = aligned(4 << 20, 1)
    best = min(_timed(lambda: _core.crc32c(page)) for _ in range(100))
    return page.size / best / 1e9


def others(folder: Path, count: int) -> dict[str, tuple[float, float] | None]:
    """The same 4 MiB values through other ways: write and read in GB/s."""
    table: dict[str, tuple[float, float] | None] = {}
    for name, act in (
        ("safetensors files", safetensors_files),
        ("LMDB values", lmdb_values),
        ("DeepSpeed AIO", deepspeed_aio),
    ):
        home = folder / "others"
        home.mkdir()
        try:
            speeds = act(home, block=BLOCKS["4m"], count=count)
            table[name] = None if speeds is None else (speeds[0] / 1e9, speeds[1] / 1e9)
        except ImportError:
            table[name] = None
        shutil.rmtree(home)
    return table


def main() -> None:
    """Measures, prints one table, writes JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--quick", action="store_true", help="512 MiB a side instead of 2 GiB")
    parser.add_argument("--dir", type=Path, default=Path(tempfile.gettempdir()))
    arguments = parser.parse_args()
    require_fio()
    total, pairs = (512 << 20 if arguments.quick else 2 << 30), 7
    fields: dict[str, Any] = {}
    details: dict[str, Any] = {}
    arguments.dir.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=arguments.dir) as name:
        folder = Path(name)
        for label, block in BLOCKS.items():
            details[label] = compare(folder, block, total, pairs)
            fields[f"write_ratio_{label}"] = details[label]["write"]["ratio"]
            fields[f"read_ratio_{label}"] = details[label]["read"]["ratio"]
            print(label, json.dumps(details[label]), flush=True)
        fields["fallback_ratio_4m"], fields["cpu_s_per_gb"] = fallback(folder, total, pairs)
        fields.update(small_records(folder / "small", 4000 if arguments.quick else 20_000))
        fields["crc_gbps"] = crc_gbps()
        table = others(folder, 32 if arguments.quick else 128)
    for field, value in fields.items():
        word = "at most" if field.endswith("lookup_us") else "reach"
        reach = f"   {word} {REACH[field]}" if field in REACH else ""
        print(f"{field:20} {value:10.3f}{reach}")
    print(f"{'4 MiB values':20} {'write GB/s':>10} {'read GB/s':>10}")
    rows = {"tiercache": (details["4m"]["write"]["ours_gbps"], details["4m"]["read"]["ours_gbps"]), **table}
    for label, speeds in rows.items():
        print(
            f"{label:20} "
            + ("not installed, or not compiled" if speeds is None else f"{speeds[0]:10.2f} {speeds[1]:10.2f}")
        )
    machine = {**describe_machine(), "crc_path": _core.crc32c_path(), "rung": details["4m"]["rung"]}
    arguments.json.write_text(
        json.dumps({**fields, "details": details, "others": rows, "machine": machine}, indent=1)
    )


if __name__ == "__main__":
    main()
