"""simulate, tune and report from the command line, on a small trace of the project's own format."""

import json

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from tiercache import PageKey, open_store
from tiercache.cli import main
from tiercache.policies import base
from tiercache.policies.profiles import USUAL, read_profile
from tiercache.policies.spec import ADMISSIONS
from tiercache.policies.traces import make_trace, read_trace, write_oracle_general, write_parquet
from tiercache.policies.tune import Choice, Tuned, make_tiers, tune, write_config


@pytest.fixture
def recorded(tmp_path):
    rng = np.random.default_rng(2)
    keys = np.concatenate(
        [rng.zipf(1.3, 1500) % 200, np.tile(np.arange(300, 420), 5), rng.zipf(1.3, 1500) % 200]
    )
    sizes = rng.integers(1000, 5000, 500)
    path = tmp_path / "run.parquet"
    write_parquet(make_trace(keys, sizes[keys], times_s=np.arange(len(keys)) * 0.01), path)
    return path


def test_both_formats_keep_what_they_are_given(recorded, tmp_path):
    trace = read_trace(recorded)
    path = tmp_path / "run.oracleGeneral.bin"
    write_oracle_general(trace, path)
    again = read_trace(path)
    for name in ("id", "size", "op"):
        assert (again.requests[name] == trace.requests[name]).all()
    assert again.has_next_uses
    assert trace.keys.dtype.kind == "i"


def test_simulate_writes_figures_and_curves(recorded, tmp_path, capsys):
    figures, plot = tmp_path / "out.json", tmp_path / "out.png"
    arguments = ["simulate", str(recorded), "--policy", "lru,fifo", "--capacity", "100KiB,300KiB"]
    arguments += ["--below", "host=1MiB:lru", "--json", str(figures), "--plot", str(plot), "--warmup", "0.1"]
    assert main(arguments) == 0
    assert "regret" in capsys.readouterr().out
    rows = json.loads(figures.read_text())["results"]
    assert [(row["policy"], row["capacity_bytes"]) for row in rows] == [
        (name, size) for size in (102400, 307200) for name in ("lru", "fifo")
    ]
    assert all(row["miss_ratio"] >= row["optimum_miss_ratio"] for row in rows)
    assert all(len(row["tiers"]) == 2 and row["stall_s"] > 0 for row in rows)
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_wrong_arguments_are_one_line(recorded, capsys):
    assert main(["simulate", str(recorded), "--capacity", "1KiB"]) == 2
    assert "is larger than tier" in capsys.readouterr().err
    assert main(["simulate", str(recorded), "--policy", "nru"]) == 2
    assert "unknown" in capsys.readouterr().err
    assert main(["simulate", str(recorded), "--below", "host"]) == 2
    assert "--below" in capsys.readouterr().err


def test_report_is_one_page(recorded, tmp_path):
    page = tmp_path / "run.html"
    assert (
        main(["report", str(recorded), "--policy", "lru,fifo", "--below", "host=500KiB", "--out", str(page)])
        == 0
    )
    text = page.read_text()
    for heading in ("Miss ratio over capacity", "Traffic over time", "Reuse distances", "Evicted too early"):
        assert heading in text
    assert text.count("data:image/png;base64,") == 3
    assert "http" not in text


def test_tune_writes_what_a_store_then_does(recorded, tmp_path, monkeypatch, capsys):
    """Policy, parameters and admission of every tier that evicts, chosen by the command, taken by open_store."""
    grid = {"clock": [{"bits": 2}], "lru": [{}]}
    monkeypatch.setattr("tiercache.policies.tune.GRID", grid)
    capacities = {"device": 150_000, "host": 400_000, "disk": 10**9}
    said: list[str] = []
    tuned = tune(read_trace(recorded), capacities, USUAL, progress=said.append)
    assert tuned.train[1] <= tuned.train[0]
    # both policies, then with each of five admissions (two limits of size)
    assert [line.partition(" candidates")[0] for line in said[:2]] == [
        "device, round 1: 2",
        "device, round 2: 10",
    ]
    assert list(tuned.table) == ["device", "host"]
    assert {choice.policy for choice, _ in tuned.table["device"]} == set(grid)
    assert tuned.tiers[2].policy == "lru"
    assert tuned.tiers[2].admission == "always"
    out, figures = tmp_path / "tuned.toml", tmp_path / "tuned.json"
    arguments = ["tune", str(recorded), "--device", "150KB", "--host", "400KB", "--disk", "1GB"]
    arguments += ["--disk-directory", str(tmp_path / "pages"), "--out", str(out), "--json", str(figures)]
    assert main(arguments) == 0
    assert "held-out 30%" in capsys.readouterr().out
    chosen = json.loads(figures.read_text())["tiers"]
    with open_store(config=out) as store:
        for tier, told in zip(tuned.tiers[:2], chosen, strict=False):
            policy = store._books.policies[["device", "host"].index(tier.name)]
            options = {**tier.params, "admission": tier.admission, "admission_limit": tier.admission_limit}
            options = {k: v for k, v in options.items() if v not in (None, "always")}
            assert store.config.policy_of(tier.name) == (tier.policy, options)
            assert (told["policy"], told["params"], told["admission"]) == (
                tier.policy,
                tier.params,
                tier.admission,
            )
            assert policy.name == tier.policy
            assert policy.M[base.ADMISSION] == ADMISSIONS[tier.admission]
        store.put(PageKey(bytes(32), 0, "value"), torch.zeros(1000))
        with store.read(PageKey(bytes(32), 0, "value")) as lease:
            assert not lease.tensor.any()


def test_every_choice_of_the_tuner_opens_a_store(tmp_path):
    """Parameters and admissions are written as the store reads them, whatever wins."""
    tiers = make_tiers({"device": 1 << 20, "host": 1 << 20, "disk": 1 << 30}, USUAL, "lru")
    for number, choice in enumerate(
        (
            Choice("2q", {"in_share": 0.1}, "size", 4096),
            Choice("slru", {"segments": 2}, "ghost"),
            Choice("lru", {}, "second_hit", 3),
        )
    ):
        tuned = Tuned((choice.apply(tiers[0]), choice.apply(tiers[1]), tiers[2]), tiers, (0, 0), (0, 0), {})
        path = tmp_path / f"{number}.toml"
        path.write_text(write_config(tuned, {"device": "1MiB", "host": "1MiB"}, "a comment\nof two lines"))
        with open_store(config=path) as store:
            name, options = store.config.policy_of("host")
        wanted = {"admission": choice.admission, "admission_limit": choice.admission_limit}
        assert name == choice.policy
        assert options == {**choice.params, **{k: v for k, v in wanted.items() if v is not None}}
    assert str(Choice("clock", {"bits": 2}, "size", 9)) == "clock(bits=2) + size <= 9"


def test_a_sampled_run_states_its_error(recorded, tmp_path, capsys):
    figures = tmp_path / "out.json"
    arguments = ["simulate", str(recorded), "--capacity", "300KiB", "--json", str(figures)]
    assert main([*arguments, "--sample", "0.5", "--plot", str(tmp_path / "out.png")]) == 0
    sampled = json.loads(figures.read_text())["results"][0]
    assert "±" in capsys.readouterr().out
    assert main(arguments) == 0
    exact = json.loads(figures.read_text())["results"][0]
    assert exact["miss_ratio_error"] == 0 < sampled["miss_ratio_error"] < 0.5
    assert abs(sampled["miss_ratio"] - exact["miss_ratio"]) < 2 * sampled["miss_ratio_error"]


def test_simulate_replays_a_recorded_store(tmp_path, capsys):
    path, figures = tmp_path / "run.parquet", tmp_path / "out.json"
    with open_store(device=4 * 4096, host="1MiB", policy={"device": "lru"}, trace=path) as store:
        for number in [page for last in range(1, 12) for page in (0, last)] * 2:
            key = PageKey(number.to_bytes(32, "little"), 0, "value")
            if store.contains(key):
                store.read(key).release()
            else:
                store.put(key, torch.zeros(4096, dtype=torch.uint8))
    assert main(["simulate", str(path), "--replay", "--json", str(figures)]) == 0
    assert "identical" in capsys.readouterr().out
    (row,) = json.loads(figures.read_text())["replay"]
    assert (row["tier"], row["policy"]) == ("device", "lru")
    assert row["victims"] > 10
    assert row["identical"] == row["choices"]
    table = pq.read_table(path)
    rows = [i for i, name in enumerate(table["op"].to_pylist()) if name != "hit"]
    pq.write_table(table.take(rows), path)
    assert main(["simulate", str(path), "--replay"]) == 2
    assert "other victims than recorded" in capsys.readouterr().err


def test_a_profile_overrides_the_usual_speeds(tmp_path):
    path = tmp_path / "profile.json"
    path.write_text(json.dumps({"tiers": {"disk": {"read_latency_s": 1e-3, "read_bytes_per_s": 1e9}}}))
    speeds = read_profile(path)
    assert speeds["disk"].latency_s == 1e-3
    assert speeds["host"] == USUAL["host"]
