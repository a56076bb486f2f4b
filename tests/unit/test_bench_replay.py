"""The replay benchmark's arithmetic, and its contenders' gradients."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest


@pytest.mark.parametrize("contender", ["dense_checkpointed", "prefix_grouper", "tiercache"])
def test_a_contender_has_the_gradient_of_dense_training(bench: Any, contender: str, tmp_path: Path) -> None:
    assert bench("replay_side").check_contender(contender, tmp_path) <= 1e-5


def test_the_check_of_a_contender_can_fail(bench: Any, tmp_path: Path) -> None:
    assert bench("replay_side").check_contender("tiercache_detached", tmp_path) > 1e-2


def test_the_ideal_is_that_of_the_design(bench: Any) -> None:
    shape = bench("replay_workload").Shape(prompt=4096, tail=64, branches=8)
    assert shape.ideal == pytest.approx(3 * 8 * (4096 + 64) / (4 * 4096 + 3 * 8 * 64))


def test_ragged_tails_stay_in_their_range(bench: Any) -> None:
    lengths = bench("replay_workload").Shape(prompt=9, branches=64, ragged=True).tail_lengths()
    assert min(lengths) >= 16
    assert max(lengths) <= 256
    assert len(set(lengths)) > 8


@pytest.mark.parametrize("quick", [True, False])
def test_every_field_comes_from_the_runs_of_the_plan(bench: Any, quick: bool) -> None:
    plan, fields = bench("replay_plan"), bench("replay_fields")
    results: dict[str, list[dict[str, Any]]] = {}
    for job in plan.plan(quick=quick):
        seconds = {"dense": 40.0, "dense_checkpointed": 50.0, "tiercache": 30.0}.get(job.name, 20.0)
        report = {"gradient_sum_bytes": 100, "stall_s": 3.0} if job.contender.startswith("tiercache") else {}
        run = {"seconds": seconds, "peak_bytes": 1100 if report else 4000, "report": report}
        results.setdefault(job.name, []).append(
            {"runs": [{"shape": i, **run} for i in range(len(job.shapes))]}
        )
    found = fields.compute_fields(results, plan.SHAPES, {"tiercache": 0.04, "dense": 0.039})
    assert set(fields.GOALS) <= set(found)
    assert found["speedup_exact"] == pytest.approx(40 * 4 / 30)  # the faster dense contender, 2 rows of 8
    assert found["peak_rss_ratio"] == 0.25
    assert found["peak_rss_ratio_with_sums"] == 0.275
    assert found["stall_fraction"] == pytest.approx(0.1)
    assert ("dense_s_all_rows" in found) is not quick
    assert any(
        line.startswith("fraction_of_ideal ")
        for line in bench("jobs").missed_goals({**found, "fraction_of_ideal": 0.5}, fields.GOALS)
    )


@pytest.mark.parametrize("quick", [True, False])
def test_a_codec_is_compared_with_the_default_in_turns(bench: Any, quick: bool) -> None:
    codec, jobs = bench("replay_codec"), bench("jobs")
    plan = codec.codec_plan("auto", quick=quick)
    assert [job.extra.get("options", {}).get("codec", "raw") for job in plan][:2] == ["raw", "auto"]
    assert {job.shapes for job in plan} == {("p2048",)}
    results: dict[str, list[dict[str, Any]]] = {}
    for job in plan:
        coded = bool(job.extra)
        moved = {"host->disk": 60 if coded else 90, "disk->device": 500}
        run = {"seconds": 11.0 if coded else 10.0, "store": {"bytes_moved": moved}}
        results.setdefault(job.name, []).append({"runs": [run]})
    found = codec.codec_fields("auto", results)
    assert found["auto_over_default"] == pytest.approx(1.1)
    assert (found["auto_to_disk_bytes"], found["default_to_disk_bytes"]) == (60, 90)
    assert len(jobs.missed_goals(found, codec.codec_goals("auto"))) == 1


def test_some_jobs_alone_have_no_fields_and_miss_no_goal(
    bench: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    jobs, fields = bench("jobs"), bench("replay_fields")
    arguments = argparse.Namespace(json=tmp_path / "out.json", quick=True, tiny=True)
    jobs.Results("replay", arguments).finish({}, {"dense": [{"runs": []}]}, fields.GOALS)
    assert json.loads(arguments.json.read_text())["runs"] == {"dense": [{"runs": []}]}
    assert "not reached" not in capsys.readouterr().out
