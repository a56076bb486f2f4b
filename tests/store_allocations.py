"""A program: random work on a store, under a preloaded count of every large allocation. Prints its peak in JSON.

store_allocations.py CODEC HOST_PAGES DIRECTORY
"""

from __future__ import annotations

import ctypes
import gc
import json
import random
import sys

import torch

from tiercache import PageKey, open_store
from tiercache.errors import TierFullError

PAGE = 4 << 20
DEVICE_PAGES = 3


def make(number: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(number)
    # Repeated rows: made without a temporary of a page's size.
    row = torch.randn(1024, generator=generator).to(dtype)
    return torch.empty(PAGE // dtype.itemsize // 1024, 1024, dtype=dtype).copy_(row)


def key(number: int, kind: str = "key") -> PageKey:
    return PageKey(number.to_bytes(32, "big"), 0, kind, 0 if kind == "key" else 1)


def main() -> None:
    codec, host_pages, directory = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    counter = ctypes.CDLL(None)
    counter.live_allocations.restype = counter.peak_allocations.restype = ctypes.c_long
    torch.set_num_threads(1)
    host = {"host": host_pages * PAGE + (10 << 20)} if host_pages else {}
    options = {"codec": codec, "staging": 10 << 20, "disk": directory, "disk_capacity": "256MiB"}
    rng, alive = random.Random(1), set()
    with open_store(DEVICE_PAGES * PAGE, **host, **options) as store:
        gc.collect()
        before = counter.live_allocations()
        counter.begin_peak()
        for turn in range(70):
            n, action = rng.randrange(10), rng.random()
            try:
                if action < 0.35 and n not in alive:
                    store.put(key(n), make(n, torch.bfloat16), own=rng.random() < 0.5)
                    alive.add(n)
                elif action < 0.7 and n in alive:
                    store.read(key(n)).release()
                elif action < 0.8:
                    store.accumulate(key(n % 2, "grad_key"), make(turn, torch.float32))
                elif action < 0.85:
                    store.take(key(n % 2, "grad_key"))
                elif action < 0.95:
                    store.prefetch([key(n), key((n + 1) % 10)])
                elif n in alive:
                    store.take(key(n))
                    alive.discard(n)
            except TierFullError as error:
                raise SystemExit(str(error)) from error
        store.flush()
        stats = store.stats()
        peak = counter.peak_allocations() - before
    sys.stdout.write(
        json.dumps({"peak": peak, "moved": stats.bytes_moved, "staging": stats.staging_peak_bytes})
    )


if __name__ == "__main__":
    main()
