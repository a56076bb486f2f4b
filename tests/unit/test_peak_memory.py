"""The probe that benchmarks and the demo measure with."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest

from tiercache.cli import peak_memory
from tiercache.cli.peak_memory import PeakMemory

SIZE = 64 << 20


def test_a_block_that_is_freed_again_is_in_the_peak() -> None:
    with PeakMemory() as memory:
        block = np.ones(SIZE, dtype=np.uint8)
        del block
    assert 0.95 * SIZE < memory.peak_bytes < 2 * SIZE  # the kernel counts in batches of pages


def test_what_was_held_before_is_not() -> None:
    held = np.ones(SIZE, dtype=np.uint8)
    with PeakMemory() as memory:
        pass
    assert memory.peak_bytes < SIZE // 4
    assert memory.base_bytes > SIZE
    assert held.sum() == SIZE


def test_samples_follow_the_block_and_carry_the_probe() -> None:
    with PeakMemory(interval_s=0.005, probe=lambda: {"device": 7}) as memory:
        block = np.ones(SIZE, dtype=np.uint8)
        time.sleep(0.1)
    assert max(sample[1] for sample in memory.samples) > SIZE // 2
    assert all(sample[2] == {"device": 7} for sample in memory.samples)
    assert memory.samples[-1][0] == pytest.approx(memory.seconds, abs=0.05)
    assert block.sum() == SIZE


def test_without_a_high_water_mark_the_highest_sample_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peak_memory, "_CLEAR_REFS", Path("/no/such/file"))
    with PeakMemory(interval_s=0.005) as memory:
        block = np.ones(SIZE, dtype=np.uint8)
        time.sleep(0.1)
        del block
    assert SIZE // 2 < memory.peak_bytes < 2 * SIZE


def test_an_error_inside_ends_the_sampler() -> None:
    import threading

    with pytest.raises(ZeroDivisionError), PeakMemory():
        _ = 1 / 0
    assert "peak-memory" not in {thread.name for thread in threading.enumerate()}
