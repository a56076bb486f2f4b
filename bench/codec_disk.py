"""Pages through the disk tier, coded and raw, in one run: what a codec gains where it is used."""

from __future__ import annotations

import hashlib
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tiercache.codecs import Codec, create_codec
from tiercache.entry import PageKey
from tiercache.tiers import PageMeta, Slot
from tiercache.tiers.disk import DiskTier

NAMES = ("raw", "exponent")
_WORKERS = 4  # twice as many as small machines have cores: while some wait for the drive, the others code


class Workers:
    """Threads that each have memory for a payload and for a page of every shape.

    All codecs use the same memory: a virtual machine's drive reads 1.3 to 1.9 GB/s, depending on nothing but where the
    memory lies.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._mine = threading.local()
        self._pool = ThreadPoolExecutor(_WORKERS)

    def spread(self, work: Callable[[int], Any], count: int) -> list[Any]:
        """What `work` gives for every number below `count`."""
        return list(self._pool.map(work, range(count)))

    def room(self) -> Any:
        """The calling thread's memory for a payload."""
        if not hasattr(self._mine, "room"):
            self._mine.room = _aligned(self._most_bytes)
        return self._mine.room

    def out(self, page: torch.Tensor) -> torch.Tensor:
        """The calling thread's memory for a decoded page."""
        outs = self._mine.__dict__.setdefault("outs", {})
        if page.shape not in outs:
            outs[page.shape] = torch.empty_like(page)
        return outs[page.shape]


class DiskRun:
    """Writes pages through a codec into a disk tier and reads them back, a few workers at a time."""

    def __init__(
        self, tier: DiskTier, codec: Codec, workers: Workers, pages: list[torch.Tensor], keys: list[PageKey]
    ) -> None:
        self.tier, self.codec, self.workers, self.pages, self.keys = tier, codec, workers, pages, keys
        self._slots: list[tuple[Slot, PageMeta]] = []

    def write_all(self) -> None:
        """Every page encoded and on the drive."""
        self._slots = self.workers.spread(self._write, len(self.pages))
        self.tier.flush()

    def read_all(self) -> None:
        """Every page read and decoded."""
        self.workers.spread(self._read, len(self.pages))

    def free_all(self) -> None:
        """Gives the room back."""
        for slot, _ in self._slots:
            self.tier.free(slot)
        self._slots = []

    def check(self, index: int) -> bool:
        """Whether a page comes back as it was."""
        out = torch.empty_like(self.pages[index])
        self._fetch(index, out)
        return torch.equal(out.view(torch.int16), self.pages[index].view(torch.int16))

    def _write(self, index: int) -> tuple[Slot, PageMeta]:
        page = self.pages[index]
        room = self.workers.room()
        used = self.codec.encode(page, room, self.keys[index])
        digest = hashlib.blake2b(index.to_bytes(8, "little"), digest_size=32).digest()
        meta = PageMeta(digest, bytes(32), "bfloat16", tuple(page.shape), self.codec.name, page.nbytes, used)
        slot = self.tier.reserve(used)
        self.tier.write(slot, room[:used], meta)
        return slot, meta

    def _read(self, index: int) -> None:
        self._fetch(index, self.workers.out(self.pages[index]))

    def _fetch(self, index: int, out: torch.Tensor) -> None:
        slot, meta = self._slots[index]
        payload = self.workers.room()[: meta.stored_bytes]
        self.tier.read(slot, payload, meta)
        self.codec.decode(payload, out)


def _aligned(num_bytes: int) -> Any:
    """Bytes that start at a multiple of 4096, so that the tier needs no bounce buffer."""
    room = np.zeros(num_bytes + 8192, np.uint8)
    start = -room.ctypes.data % 4096
    return room[start : start + (num_bytes + 4095) // 4096 * 4096]


def disk_gain(
    kinds: dict[str, list[torch.Tensor]], repeats: int, directory: str | None, rounds: int
) -> dict[str, Any]:
    """Pages a second through the disk tier with `exponent` and with `raw`, taking turns, and their quotients."""
    pages = [page for of_kind in kinds.values() for page in of_kind] * repeats
    keys = [PageKey(bytes(32), 0, kind) for kind, of_kind in kinds.items() for _ in of_kind] * repeats
    total = sum(page.nbytes for page in pages)
    seconds: dict[str, dict[str, list[float]]] = {name: {"write": [], "read": []} for name in NAMES}
    with tempfile.TemporaryDirectory(dir=directory) as folder:
        tier = DiskTier(Path(folder) / "pages", 4 * total + (1 << 28))
        try:
            codecs = {name: create_codec(name) for name in NAMES}
            most = max(c.max_encoded_bytes(p.dtype, tuple(p.shape)) for c in codecs.values() for p in pages)
            workers = Workers(most)
            runs = {name: DiskRun(tier, codec, workers, pages, keys) for name, codec in codecs.items()}
            for turn in range(rounds + 1):
                for name in NAMES if turn % 2 else NAMES[::-1]:
                    taken = {"write": _timed(runs[name].write_all), "read": _timed(runs[name].read_all)}
                    assert runs[name].check(turn % len(pages))
                    runs[name].free_all()
                    for what, value in taken.items():
                        if turn:  # the first round faults pages in
                            seconds[name][what].append(value)
            engine = tier.stats()
        finally:
            tier.close()
    return _summary(seconds, len(pages), total, engine)


def _timed(work: Callable[[], None]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def _summary(seconds: Any, num_pages: int, total: int, engine: Any) -> dict[str, Any]:
    """Medians of every kind of run, and gains: medians and quartiles over rounds, each of a run beside another.

    A drive's speed changes from second to second, so raw and coded pages are compared within a round.
    """
    middle = {
        name: {what: statistics.median(v) for what, v in runs.items()} for name, runs in seconds.items()
    }
    gains = {
        what: [r / c for r, c in zip(*(seconds[name][what] for name in NAMES), strict=True)]
        for what in ("write", "read")
    }
    both = [[w + r for w, r in zip(*runs.values(), strict=True)] for runs in seconds.values()]
    gains["both"] = [r / c for r, c in zip(*both, strict=True)]
    return {
        "pages": num_pages,
        "workers": _WORKERS,
        "rounds": len(gains["both"]),
        "page_bytes": total // num_pages,
        "pages_per_s": {
            name: {what: num_pages / v for what, v in values.items()} for name, values in middle.items()
        },
        "raw_gbps": {what: total / value / 1e9 for what, value in middle["raw"].items()},
        "write_gain": statistics.median(gains["write"]),
        "read_gain": statistics.median(gains["read"]),
        "effective_disk_gain": statistics.median(gains["both"]),
        "quartiles": {what: statistics.quantiles(values)[::2] for what, values in gains.items()},
        "engine": str(engine.get("engine", "")),
    }
