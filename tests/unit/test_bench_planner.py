"""The planner's benchmark: its arithmetic, and every kind of job at toy sizes."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from tiercache.errors import ConfigError

SECONDS = {"all": 10.0, "attention": 12.0, "layer_inputs": 13.0, "recompute": 14.0, "auto": 10.2}

# by turns, the first of each round in either order: 0.9, 1.02 and 1.1 times as long
PAIR = [("all", 10.0), ("auto", 9.0), ("auto", 10.2), ("all", 10.0), ("all", 10.0), ("auto", 11.0)]


def results_of(bench: Any) -> dict[str, list[dict[str, Any]]]:
    plan = bench("planner_plan")
    results: dict[str, list[dict[str, Any]]] = {"order": [{"fields": {"optimal_fraction": 1.0}}]}
    for job in plan.plan(quick=True).steps:
        run = {"seconds": SECONDS.get(job.mode, 20.0), "peak_bytes": 1000}
        results.setdefault(job.name, []).append({"runs": [run]})
    for name, stall_s in (("throttled", 1.0), ("no_prefetch", 9.0)):
        run = {"seconds": 20.0, "peak_bytes": 1, "stall_s": stall_s, "throttled_bytes": 1000}
        for job in plan.THROTTLED:
            results[f"{name}_{job}"] = [{"runs": [run], "bytes_per_s": 100.0}]
    for budgets in plan.BUDGETS:
        turns = [{"mode": mode, "seconds": seconds} for mode, seconds in PAIR]
        results[f"{budgets}_pair"] = [{"runs": turns}]
    predicted = {name: {"seconds": 11.0, "peak_bytes": 900} for name in plan.PREDICTED}
    results["predict"] = [{"predicted": predicted}]
    return results


def test_every_field_comes_from_the_runs_of_the_plan(bench: Any) -> None:
    fields, shapes = bench("planner_fields"), bench("planner_plan").SHAPES
    found = fields.compute_fields(results_of(bench), shapes)
    assert set(fields.GOALS) <= set(found) | {"bytes_over_bound", "plan_ms_per_1k_visits"}
    assert found["hidden_fraction"] == pytest.approx(0.9)  # 1 s of the 10 that 1000 bytes take
    assert found["hidden_fraction_no_prefetch"] == pytest.approx(0.1)
    assert found["hidden_fraction_training"] == pytest.approx(0.9)
    assert found["ideal"] == pytest.approx(4 * 4160 / (4096 + 4 * 64))
    assert found["fraction_of_ideal_all"] == pytest.approx(4 * 20 / 10 / found["ideal"])  # a row took 20 s
    assert found["best_fixed_roomy"] == "all"
    assert found["auto_over_best_fixed"] == pytest.approx(1.02)  # the median of pairs, not of single runs
    assert found["auto_over_best_fixed_roomy_range"] == pytest.approx([0.9, 1.1])
    assert found["plan_error_pct_memory"] == pytest.approx(10.0)
    assert found["plan_error_pct_time_roomy_all"] == pytest.approx(10.0)
    assert found["plan_error_pct_time"] == pytest.approx(100 * (1 - 11 / 14))  # of "tails", which recomputes


def test_a_rate_makes_transfers_take_their_share_of_compute(bench: Any) -> None:
    throttle = bench("planner_throttle")
    free = {"seconds": 12.0, "stall_s": 2.0, "throttled_bytes": 800}
    assert throttle.rate_for(free) == pytest.approx(100.0)  # 800 bytes in 0.8 of 10 s


@pytest.fixture
def toy(bench: Any, tmp_path: Path) -> Path:
    bench("replay_workload").prepare(tmp_path, tiny=True)
    return tmp_path


def job(bench: Any, kind: str, **more: Any) -> dict[str, Any]:
    shape = bench("replay_workload").Shape(prompt=320, tail=8, branches=2)
    return {"kind": kind, "shape": asdict(shape), **more}


@pytest.mark.parametrize("mode", ["dense", "attention"])
def test_a_step_runs(bench: Any, toy: Path, mode: str) -> None:
    budgets = {"device": "1MiB", "host": "1MiB", "disk_capacity": "1GiB"}
    asked = job(bench, "step", mode=mode, budgets={} if mode == "dense" else budgets, rows=None)
    (run,) = bench("planner_side").run(asked, toy)["runs"]
    assert run["seconds"] > 0
    assert ("report" in run) == (mode != "dense")


def test_two_modes_take_turns_in_one_process(bench: Any, toy: Path) -> None:
    budgets = {"device": "1MiB", "host": "1MiB", "disk_capacity": "1GiB"}
    asked = job(bench, "pair", modes=["all", "auto"], budgets=budgets, rounds=2)
    runs = bench("planner_side").run(asked, toy)["runs"]
    assert [run["mode"] for run in runs] == ["all", "auto", "auto", "all"]


@pytest.mark.parametrize("call", ["logprobs", "backward"])
def test_a_throttled_run_waits_without_look_ahead_and_moves_the_same(
    bench: Any, toy: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    from tiercache.follow import Follower

    monkeypatch.setattr(Follower, "look_ahead", Follower.look_ahead)  # put back afterwards
    side = bench("planner_side")
    found = {}
    device = {"logprobs": "48KiB", "backward": "128KiB"}[call]
    for prefetch in (True, False):
        budgets = {"device": device, "host": None, "call": call, "options": {"max_visit_tokens": 8}}
        asked = job(bench, "throttled", **budgets, bytes_per_s=4e6, prefetch=prefetch)
        (found[prefetch],) = side.run(asked, toy)["runs"]
    assert found[True]["throttled_bytes"] > 0
    assert found[False]["stall_s"] > 0


def test_a_step_is_planned_from_a_profile(bench: Any, toy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tiercache.measure.machine import this_machine
    from tiercache.usual import usual_profile

    predict = bench("planner_predict")
    usual = replace(usual_profile(accelerator=False), machine=this_machine())
    monkeypatch.setattr(predict, "measure_profile", lambda *_, **__: usual)
    steps = {"one": job(bench, "step", mode="layer_inputs", budgets={"device": "64MiB"}, rows=None)}
    found = predict.predict({"steps": steps, "seconds": 0.001}, toy)["predicted"]["one"]
    assert found["seconds"] == pytest.approx(sum(found["phases"].values()))
    assert found["peak_bytes"] > 0


def test_a_step_that_never_reaches_the_slow_tier_is_refused(bench: Any) -> None:
    with pytest.raises(ConfigError, match="nothing went to the disk tier"):
        bench("planner_throttle").rate_for(
            {"throttled_bytes": 0, "bytes_moved": {}, "seconds": 1.0, "stall_s": 0.0}
        )
