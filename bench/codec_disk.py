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

_WORKERS = 4  # twice as many as small machines have cores: while some wait for the drive, the others code


class DiskRun:
    """Writes pages through a codec into a disk tier and reads them back, a few workers at a time."""

    def __init__(self, tier: DiskTier, codec: Codec, pages: list[torch.Tensor], keys: list[PageKey]) -> None:
        self.tier, self.codec, self.pages, self.keys = tier, codec, pages, keys
        most = max(codec.max_encoded_bytes(page.dtype, tuple(page.shape)) for page in pages)
        self._most = most
        self._mine = threading.local()
        self._pool = ThreadPoolExecutor(_WORKERS)
        self._slots: list[tuple[Slot, PageMeta]] = []

    def write_all(self) -> None:
        """Every page encoded and on the drive."""
        self._slots = self._spread(self._write)
        self.tier.flush()

    def read_all(self) -> None:
        """Every page read and decoded."""
        self._spread(self._read)

    def free_all(self) -> None:
        """Gives the room back."""
        for slot, _ in self._slots:
            self.tier.free(slot)
        self._slots = []

    def check(self, index: int) -> bool:
        """Whether a page comes back as it was."""
        out = torch.empty_like(self.pages[index])
        self._fetch(index, self._room(), out)
        return torch.equal(out.view(torch.int16), self.pages[index].view(torch.int16))

    def _room(self) -> Any:
        if not hasattr(self._mine, "room"):
            self._mine.room = _aligned(self._most)
        return self._mine.room

    def _spread(self, work: Callable[[int], Any]) -> list[Any]:
        return list(self._pool.map(work, range(len(self.pages))))

    def _write(self, index: int) -> tuple[Slot, PageMeta]:
        page = self.pages[index]
        room = self._room()
        used = self.codec.encode(page, room, self.keys[index])
        digest = hashlib.blake2b(index.to_bytes(8, "little"), digest_size=32).digest()
        meta = PageMeta(digest, bytes(32), "bfloat16", tuple(page.shape), self.codec.name, page.nbytes, used)
        slot = self.tier.reserve(used)
        self.tier.write(slot, room[:used], meta)
        return slot, meta

    def _read(self, index: int) -> None:
        page = self.pages[index]
        outs = self._mine.__dict__.setdefault("outs", {})
        if page.shape not in outs:
            outs[page.shape] = torch.empty_like(page)
        self._fetch(index, self._room(), outs[page.shape])

    def _fetch(self, index: int, room: Any, out: torch.Tensor) -> None:
        slot, meta = self._slots[index]
        payload = room[: meta.stored_bytes]
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
    """Pages a second through the disk tier with `exponent` and with `raw`, interleaved, and their quotients."""
    pages = [page for of_kind in kinds.values() for page in of_kind] * repeats
    keys = [PageKey(bytes(32), 0, kind) for kind, of_kind in kinds.items() for _ in of_kind] * repeats
    total = sum(page.nbytes for page in pages)
    seconds: dict[str, dict[str, list[float]]] = {}
    with tempfile.TemporaryDirectory(dir=directory) as folder:
        tier = DiskTier(Path(folder) / "pages", 4 * total + (1 << 28))
        try:
            runs = {name: DiskRun(tier, create_codec(name), pages, keys) for name in ("raw", "exponent")}
            for turn in range(rounds + 1):
                for name, run in runs.items():
                    taken = {"write": _timed(run.write_all), "read": _timed(run.read_all)}
                    assert run.check(turn % len(pages))
                    run.free_all()
                    for what, value in taken.items():
                        if turn:  # the first round faults pages in
                            seconds.setdefault(name, {}).setdefault(what, []).append(value)
            engine = tier.stats()
        finally:
            tier.close()
    return _summary(seconds, len(pages), total, engine)


def _timed(work: Callable[[], None]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def _summary(seconds: Any, num_pages: int, total: int, engine: Any) -> dict[str, Any]:
    middle = {
        name: {what: statistics.median(v) for what, v in runs.items()} for name, runs in seconds.items()
    }
    both = {name: values["write"] + values["read"] for name, values in middle.items()}
    return {
        "pages": num_pages,
        "workers": _WORKERS,
        "page_bytes": total // num_pages,
        "pages_per_s": {
            name: {what: num_pages / v for what, v in values.items()} for name, values in middle.items()
        },
        "raw_gbps": {what: total / value / 1e9 for what, value in middle["raw"].items()},
        "write_gain": middle["raw"]["write"] / middle["exponent"]["write"],
        "read_gain": middle["raw"]["read"] / middle["exponent"]["read"],
        "effective_disk_gain": both["raw"] / both["exponent"],
        "engine": str(engine.get("engine", "")),
    }
