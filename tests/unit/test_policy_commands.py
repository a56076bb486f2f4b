"""simulate, tune and report from the command line, on a small trace of the project's own format."""

import json

import numpy as np
import pytest

from tiercache import open_store
from tiercache.cli import main
from tiercache.policies.profiles import USUAL, read_profile
from tiercache.policies.traces import make_trace, read_trace, write_oracle_general, write_parquet
from tiercache.policies.tune import Choice, tune


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


def test_tune_finds_what_beats_the_default_and_a_store_opens_with_it(recorded, tmp_path, monkeypatch):
    grid = {"lru": [{}], "lfu": [{}], "fifo": [{}]}
    monkeypatch.setattr("tiercache.policies.tune.GRID", grid)
    capacities = {"device": 150_000, "host": 400_000}
    tuned = tune(read_trace(recorded), capacities, USUAL)
    assert tuned.train[1] <= tuned.train[0]
    assert {choice.policy for choice, _ in tuned.table["device"]} <= set(grid)
    assert str(Choice("clock", {"bits": 2}, "ghost")) == "clock(bits=2) + ghost"
    out = tmp_path / "tuned.toml"
    assert main(["tune", str(recorded), "--device", "150KB", "--host", "400KB", "--out", str(out)]) == 0
    with open_store(config=out) as store:
        assert store.config.policy_of("device")[0] == tuned.tiers[0].policy


def test_a_profile_overrides_the_usual_speeds(tmp_path):
    path = tmp_path / "profile.json"
    path.write_text(json.dumps({"tiers": {"disk": {"read_latency_s": 1e-3, "read_bytes_per_s": 1e9}}}))
    speeds = read_profile(path)
    assert speeds["disk"].latency_s == 1e-3
    assert speeds["host"] == USUAL["host"]
