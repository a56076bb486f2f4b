"""The demo: what it prints and writes, its exit status, and what it says to wrong options."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tiercache.cli
from tiercache.cli.demo import race, verdict
from tiercache.cli.demo.settings import DemoSettings
from tiercache.cli.demo.table import format_bytes
from tiercache.cli.demo.workload import make_branches
from tiercache.errors import ConfigError

SMALL = ["--prompt-tokens", "300", "--branches", "3", "--tail-tokens", "8"]


def side_result(gradient: list[float], **fields: Any) -> race.SideResult:
    tiers = {"device": 1 << 20, "host": 2 << 20, "disk": 3 << 20}
    values: dict[str, Any] = {
        "step_s": 2.0,
        "peak_bytes": 100 << 20,
        "samples": [(0.0, 0, tiers), (1.0, 50 << 20, tiers), (2.0, 10 << 20, tiers)],
        "stats": {"bytes_peak": tiers, "bytes_capacity": tiers, "bytes_moved": {"device->host": 5 << 20}},
        "device": "cpu",
        "report": {"captured_tokens": 4096, "tail_tokens": 512},
        "num_parameters": len(gradient),
        "gradient": np.array(gradient, dtype=np.float32),
        "logps": np.zeros((3, 8), dtype=np.float32),
    }
    return race.SideResult(**{**values, **fields})


@pytest.fixture
def staged(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, race.SideResult]:
    """The demo in `tmp_path` with sides that have already run."""
    monkeypatch.chdir(tmp_path)
    sides = {"dense": side_result([1.0, 2.0]), "tiercache": side_result([1.0, 2.0], step_s=0.5)}
    monkeypatch.setattr(race, "run_side", lambda side, settings, folder, progress: sides[side])
    return sides


def test_the_demo_runs_both_sides_and_they_agree(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert tiercache.cli.main(["demo", *SMALL, "--json", "found.json", "--disk", str(tmp_path / "disk")]) == 0
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["exact"] is True
    assert 0 < found["gradient_difference"] < 1e-5
    assert found["dense"]["peak_bytes"] > 0
    assert found["tiercache"]["step_s"] > 0
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr().out
    for words in ("dense training", "900", "gradient difference", "disk tier", "The gradients agree"):
        assert words in printed


def test_gradients_that_disagree_are_status_1(
    staged: dict[str, race.SideResult], capsys: pytest.CaptureFixture[str]
) -> None:
    staged["tiercache"] = side_result([1.0, 2.001])
    assert tiercache.cli.main(["demo"]) == 1
    assert "The gradients disagree" in capsys.readouterr().out


@pytest.mark.parametrize("bad", [[float("nan"), 2.0], [1.0], [0.0, 0.0]])
def test_a_gradient_that_is_none_never_agrees(bad: list[float], staged: dict[str, race.SideResult]) -> None:
    staged["tiercache"] = side_result(bad)
    assert tiercache.cli.main(["demo"]) == 1


def test_the_table_and_the_json_tell_the_same(
    staged: dict[str, race.SideResult], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    staged["dense"] = replace(staged["dense"], peak_bytes=400 << 20)
    assert tiercache.cli.main(["demo", "--json", "found.json", "--figure", "memory.png"]) == 0
    printed = capsys.readouterr().out
    assert "4.0 x faster" in printed
    assert "4.0 x less" in printed
    assert "device to host" in printed
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["speedup"] == 4.0
    assert found["peak_ratio"] == 0.25
    assert (tmp_path / "memory.png").is_file()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--branches", "0"], "--branches; got 0; limit at least 1"),
        (["--prompt-tokens", "1"], "--prompt-tokens; got 1"),
        (["--tail-tokens", "none"], "--tail-tokens"),
        (["--gguf", "no-such-file.gguf"], "no-such-file.gguf"),
        (["--model", "x", "--gguf", "y"], "--model and --gguf"),
        (["--device-budget", "a lot"], "a lot"),
        (["--model", "/no/such/folder"], "/no/such/folder"),
        (["--figure", "/no/such/folder/demo.png"], "/no/such/folder"),
    ],
)
def test_wrong_options_are_one_line_and_status_2(
    options: list[str], words: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert tiercache.cli.main(["demo", *options]) == 2
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 1
    assert words in captured.err


def test_a_prompt_longer_than_the_text_is_refused(tmp_path: Path) -> None:
    budgets = {"device_budget": "1MiB", "host_budget": "1MiB", "disk": str(tmp_path)}
    wanted = DemoSettings(prompt_tokens=9_000_000, branches=2, tail_tokens=8, **budgets)
    with pytest.raises(ConfigError, match="tokens of text"):
        make_branches(wanted)


def test_a_side_that_dies_is_said_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(race, "_MODULE", "no_such_module_of_tiercache")
    assert tiercache.cli.main(["demo", *SMALL]) == 2
    assert "the tiercache side ended with status 1: " in capsys.readouterr().err


def test_differences_are_measured_in_fp64_and_relative() -> None:
    reference = np.full(3_000_000, 1e-3, dtype=np.float32)
    value = reference.copy()
    value[::2] += np.float32(1e-8)
    expected = np.linalg.norm(value.astype(np.float64) - reference) / np.linalg.norm(
        reference.astype(np.float64)
    )
    assert verdict.relative_difference(value, reference) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    ("size", "text"), [(0, "0 B"), (999, "999 B"), (1 << 20, "1 MiB"), (1500, "1.46 KiB"), (5 << 30, "5 GiB")]
)
def test_sizes_for_people(size: int, text: str) -> None:
    assert format_bytes(size) == text
