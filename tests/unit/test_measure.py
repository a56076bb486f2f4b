"""Measuring this machine: every figure is there, the file goes round, and nothing is left behind."""

from __future__ import annotations

import mmap
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tiercache.cli import main
from tiercache.cli.peak_memory import resident_bytes
from tiercache.codecs import CODECS
from tiercache.errors import ConfigError
from tiercache.measure import codecs, copies, drives, first_touch
from tiercache.measure.first_touch import touch_memory
from tiercache.measure.machine import this_machine
from tiercache.measure.timing import Budget, beside, time_of
from tiercache.profile import load_profile
from tiercache.roofline import Model, tokens_to_hide
from tiercache.usual import usual_profile

SHORT = Budget(seconds=0.001, min_repeats=1)


@pytest.fixture
def small_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures mean nothing then, but every way is walked."""
    for module in (copies, drives):
        monkeypatch.setattr(module, "PAGE_BYTES", 1 << 16)
    monkeypatch.setattr(codecs, "_SHAPE", (2, 64, 64))


def test_the_command_measures_everything_and_leaves_nothing(
    small_pages: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    disk, file, figure = tmp_path / "disk", tmp_path / "machine.json", tmp_path / "roofline.png"
    arguments = ["--disk", str(disk), "--json", str(file), "--figure", str(figure), "--seconds", "0.001"]
    threads = threading.active_count()
    assert main(["profile", *arguments]) == 0
    found = load_profile(file)
    assert found.machine == this_machine()
    assert set(found.tiers) == {"host", "disk"}
    assert set(found.parts) >= {"host memory", "arena", f"drive {disk}"}
    assert set(found.codecs) == set(CODECS) - {"auto", "const"}
    assert set(found.compute) == {"bfloat16", "float32"}
    assert found.codecs["raw"].ratio == pytest.approx(1.0)
    assert found.codecs["exponent"].ratio > 1.2
    for speed in (*found.tiers.values(), *found.parts.values()):
        assert 0 < speed.beside_compute <= 1
        assert 0 < speed.compute_share <= 1
    printed = capsys.readouterr().out
    for word in ("arithmetic", "arena", "exponent", "hide its pages"):
        assert word in printed
    assert figure.read_bytes()[:4] == b"\x89PNG"
    assert not list(disk.rglob("*.seg"))
    assert threading.active_count() <= threads


def test_a_directory_that_cannot_be_written_is_refused_at_once(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    assert main(["profile", "--disk", str(file)]) == 2
    assert main(["profile", "--seconds", "0"]) == 2


def test_a_time_is_the_median_of_the_runs_after_the_first() -> None:
    naps = iter([0.05, 0.001, 0.001, 0.03])
    assert time_of(lambda: time.sleep(next(naps)), Budget(seconds=0.0, min_repeats=3)) < 0.03


def test_work_that_waits_keeps_its_speed_beside_arithmetic_and_takes_none() -> None:
    kept, share = beside(lambda: time.sleep(0.01), lambda: time.sleep(0.002), Budget(0.1, 5))
    assert kept > 0.5
    assert share > 0.5


def test_an_error_of_the_work_beside_reaches_the_caller() -> None:
    def fail() -> None:
        if threading.current_thread() is not threading.main_thread():
            raise OSError("gone")

    with pytest.raises(OSError, match="gone"):
        beside(fail, lambda: None, SHORT)


def test_the_roofline_follows_from_bytes_and_flops() -> None:
    profile, model = usual_profile(accelerator=True), Model()
    tokens = tokens_to_hide(profile, model, "host", sums=False)
    speed = profile.tier("host")
    assert tokens * model.token_s(profile) == pytest.approx(speed.read_s(model.page_bytes(sums=False), 0))
    assert tokens_to_hide(profile, model, "host", sums=True) == pytest.approx(3 * tokens)
    assert tokens_to_hide(profile, model, "disk", sums=False) > tokens
    with pytest.raises(ConfigError, match="tier 'tape'"):
        tokens_to_hide(profile, model, "tape", sums=False)


def test_measuring_leaves_torch_alone(small_pages: None) -> None:
    threads = torch.get_num_threads()
    copies.measure_memory(torch.device("cpu"), lambda: None, SHORT)
    assert torch.get_num_threads() == threads


@pytest.mark.parametrize(
    ("asked", "available", "pieces"), [(600, 10_000, 2), (5000, 10_000, 3), (1 << 40, 700, 2), (100, 100, 0)]
)
def test_memory_is_touched_within_what_is_available_and_given_back(
    monkeypatch: pytest.MonkeyPatch, asked: int, available: int, pieces: int
) -> None:
    taken = []

    class Piece(mmap.mmap):
        """Counts what is written, and has a kernel without huge pages."""

        writes = 0

        def __setitem__(self, offset: Any, value: Any) -> None:
            self.writes += 1
            super().__setitem__(offset, value)

        def madvise(self, *_: Any) -> None:
            raise OSError(22, "Invalid argument")

    def mapped(handle: int, num_bytes: int) -> mmap.mmap:
        if len(taken) == 3:
            raise OSError(12, "Cannot allocate memory")
        taken.append(Piece(handle, num_bytes))
        return taken[-1]

    stand_in = SimpleNamespace(mmap=mapped, PAGESIZE=mmap.PAGESIZE, MADV_HUGEPAGE=14)
    monkeypatch.setattr(first_touch, "_core", SimpleNamespace(available_memory=lambda: available << 20))
    monkeypatch.setattr(first_touch, "mmap", stand_in)
    before = resident_bytes()
    assert touch_memory(asked << 20) >= 0
    assert len(taken) == pieces
    assert all(piece.closed and piece.writes == (256 << 20) // mmap.PAGESIZE for piece in taken)
    assert resident_bytes() < before + (64 << 20)
