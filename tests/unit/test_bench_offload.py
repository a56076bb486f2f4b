"""The offload benchmark's arithmetic, and its contenders' gradients at toy sizes."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

BENCH = Path(__file__).parent.parent.parent / "bench"
MIB = 1 << 20


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The benchmark's modules by name, as they import one another."""
    monkeypatch.syspath_prepend(str(BENCH))
    before = set(sys.modules)
    yield __import__
    for name in set(sys.modules) - before:
        if name.startswith(("offload_", "replay_")) and (BENCH / f"{name}.py").is_file():
            del sys.modules[name]


def run(bench: Any, contender: str, folder: Path) -> dict[str, Any]:
    job = {"model": "gpt", "contender": contender, "steps": 1, "tiny": True, "device_bytes": 300_000}
    return bench("offload_side").run(job, folder)


@pytest.fixture
def plain(bench: Any, tmp_path: Path) -> dict[str, Any]:
    return run(bench, "none", tmp_path)


@pytest.mark.parametrize(
    "contender", ["identity", "save_on_cpu", "tutorial_disk", "ours_unlimited", "ours_disk", "ours_all"]
)
def test_a_contender_has_the_gradients_of_the_plain_step(
    bench: Any, plain: dict[str, Any], contender: str, tmp_path: Path
) -> None:
    found = run(bench, contender, tmp_path)
    assert found["gradients"] == plain["gradients"]
    assert len(found["runs"]) == 1
    if contender in ("tutorial_disk", "ours_disk", "ours_all"):
        assert found["moved_bytes"] > 100_000
    if contender == "ours_unlimited":
        assert found["moved_bytes"] == 0
    if contender == "ours_disk":
        assert found["stats"]["bytes_moved"]["device->disk"] > 0
    assert {path.name for path in tmp_path.iterdir()} <= {"pages"}


def left(bench: Any, contender: str, seconds: float, peak_bytes: int, **more: Any) -> dict[str, Any]:
    return {"runs": [{"seconds": seconds, "peak_bytes": peak_bytes}] * 2, "gradients": "same", **more}


def results_of(bench: Any) -> dict[tuple[str, str], list[dict[str, Any]]]:
    results = {}
    for contender in bench("offload_contenders").CONTENDERS:
        seconds, peak = {"ours_disk": (12.0, 40 * MIB), "ours_unlimited": (10.1, 100 * MIB)}.get(
            contender, (10.0, 100 * MIB)
        )
        more = {
            "moved_bytes": 60 * MIB if contender.startswith("ours") else 3 * 100 * MIB,
            "stored_bytes": 50 * MIB,
            "overshoot_bytes": -5,
            "stats": {"bytes_capacity": {"device": 18 * MIB}},
        }
        results["gpt", contender] = [left(bench, contender, seconds, peak, **more)]
    return results


def test_every_field_comes_from_the_runs(bench: Any) -> None:
    fields = bench("offload_fields")
    found = fields.compute_fields(results_of(bench), ["gpt"], 30)
    assert set(fields.GOALS) <= set(found)
    assert found["overhead_unlimited"] == pytest.approx(1.01)
    assert found["rss_ratio_disk"] == pytest.approx(0.4)
    assert found["time_ratio_disk"] == pytest.approx(1.2)
    assert found["bytes_moved_over_naive"] == pytest.approx(0.6)
    assert found["budget_overshoot"] == 0
    assert found["gradients_equal"] is True
    assert fields.missed_goals(found) == []


def test_what_is_not_measured_is_null_and_says_why(bench: Any) -> None:
    fields = bench("offload_fields")
    found = fields.compute_fields(results_of(bench), ["gpt"], None)
    for name in ("trl_step_ratio", "trl_peak_ratio"):
        assert found[name] is None
        assert found["not_measured"][name]


def test_a_worse_run_is_seen(bench: Any) -> None:
    fields = bench("offload_fields")
    results = results_of(bench)
    results["gpt", "ours_disk"][0]["gradients"] = "other"
    results["gpt", "ours_disk"][0]["overshoot_bytes"] = MIB
    found = fields.compute_fields(results, ["gpt"], 29)
    assert found["gradients_equal"] is False
    missed = fields.missed_goals(found)
    assert len(missed) == 2
    assert missed[0].startswith("budget_overshoot")
    assert missed[1].startswith("traps_passed")
