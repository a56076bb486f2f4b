"""Steps of a frozen reference over a store that keeps pages, for tests that end the process in between."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import dense
import torch
import trees
from plain_model import PlainGPT, build_plain

from tiercache import open_store
from tiercache.runtime import prefix_attention
from tiercache.runtime.reference import Reference


def batches() -> tuple[list[Any], list[Any]]:
    """Two steps on one prompt of 40 tokens, with completions of their own."""
    maker = trees._Maker(61, 3)
    prompt = maker.tokens(40)
    rows = [maker.row(prompt, maker.tokens(n)) for n in (5, 3, 6, 4)]
    return rows[:2], rows[2:]


def frozen(**options: Any) -> torch.nn.Module:
    return build_plain(prefix_attention, **options).requires_grad_(requires_grad=False)


@contextmanager
def opened(folder: Path, **options: Any) -> Iterator[Any]:
    given = {"device": "64KiB", "disk_capacity": "64MiB", "durability": "process", **options}
    with open_store(disk=folder, **given) as store:
        yield store
        store.check_integrity()


def step(reference: Reference, rows: list[Any]) -> tuple[int, int]:
    """Tokens read and tokens captured; the values must be those of whole rows."""
    got = reference.logprobs(*trees.pad(rows))
    want = dense.logprobs(reference.model, rows)
    close = 1e-12 if isinstance(reference.model, PlainGPT) and want.dtype == torch.float64 else 1e-4
    assert torch.allclose(got, want, rtol=close, atol=close)
    return reference.reused_tokens, reference.report.captured_tokens


def one_life(folder: Path, number: int, *, flush: bool) -> None:
    """One process's step, ended by kill -9."""
    with opened(folder) as store:
        told = step(Reference(frozen(), store, weights_id="a", min_shared_tokens=1), batches()[number])
        sys.stdout.write(json.dumps(told))
        sys.stdout.flush()
        if flush:
            store.flush()
        os.kill(os.getpid(), signal.SIGKILL)
