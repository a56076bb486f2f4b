"""The offload benchmark's arithmetic, and its contenders' gradients at toy sizes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

MIB = 1 << 20


def run(bench: Any, contender: str, folder: Path) -> dict[str, Any]:
    job = {"model": "gpt", "contender": contender, "steps": 1, "tiny": True, "device_bytes": 300_000}
    return bench("offload_side").run(job, folder)


@pytest.fixture(scope="module")
def plain(bench: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run(bench, "none", tmp_path_factory.mktemp("plain"))


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
            "resident_peak_bytes": 80 * MIB,
            "overshoot_bytes": -5,
            "stats": {"bytes_capacity": {"device": 18 * MIB}},
        }
        results["gpt", contender] = [left(bench, contender, seconds, peak, **more)]
    return results


def missed(bench: Any, found: dict[str, Any]) -> list[str]:
    return bench("jobs").missed_goals(found, bench("offload_fields").GOALS)


def test_every_field_comes_from_the_runs(bench: Any) -> None:
    fields = bench("offload_fields")
    found = fields.compute_fields(results_of(bench), ["gpt"], 30)
    assert set(fields.GOALS) <= set(found)
    assert found["overhead_unlimited"] == pytest.approx(1.01)
    assert found["rss_ratio_disk"] == pytest.approx(0.4)
    assert found["time_ratio_disk"] == pytest.approx(1.2)
    assert found["bytes_moved_over_naive"] == pytest.approx(0.6)
    assert found["share_moved_disk_gpt"] == pytest.approx(60 / 80)
    assert found["budget_overshoot"] == 0
    assert found["gradients_equal"] is True
    assert missed(bench, found) == []


def test_what_did_not_run_is_null(bench: Any) -> None:
    fields = bench("offload_fields")
    found = fields.compute_fields(results_of(bench), ["gpt"], None)
    assert found["trl_step_ratio"] is None
    assert found["trl_peak_ratio"] is None
    assert found["traps_passed"] is None
    assert fields.compute_fields(trl_results(bench), ["trl"], None)["overhead_unlimited"] is None


def trl_results(bench: Any) -> dict[tuple[str, str], list[dict[str, Any]]]:
    figures = {"trl": (50.0, 3000), "trl_defaults": (60.0, 2000), "trl_ours": (15.0, 1000)}
    return {("trl", name): [left(bench, name, *figure)] for name, figure in figures.items()}


def test_trl_is_compared_at_its_fastest_and_at_its_smallest(bench: Any) -> None:
    found = bench("offload_fields").compute_fields(trl_results(bench), ["trl"], None)
    assert found["trl_step_ratio"] == pytest.approx(15 / 50)
    assert found["trl_peak_ratio"] == pytest.approx(1000 / 2000)


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("contender", ["trl", "trl_ours"])
def test_a_step_of_trl_is_measured_after_its_completions(bench: Any, contender: str, tmp_path: Path) -> None:
    bench("replay_workload").prepare(tmp_path, tiny=True)
    job = {"model": "trl", "contender": contender, "steps": 2, "tiny": True}
    found = bench("offload_side").run(job, tmp_path)
    assert len(found["runs"]) == 2
    assert all(run["seconds"] > 0 for run in found["runs"])
    if contender == "trl_ours":
        assert found["report"]["captured_tokens"] == 320


def test_a_worse_run_is_seen(bench: Any) -> None:
    fields = bench("offload_fields")
    results = results_of(bench)
    results["gpt", "ours_disk"][0]["gradients"] = "other"
    results["gpt", "ours_disk"][0]["overshoot_bytes"] = MIB
    found = fields.compute_fields(results, ["gpt"], 29)
    assert found["gradients_equal"] is False
    lines = missed(bench, found)
    assert len(lines) == 2
    assert lines[0].startswith("budget_overshoot")
    assert lines[1].startswith("traps_passed")
