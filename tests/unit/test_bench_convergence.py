"""The convergence benchmark runs, and its exact run is its dense run."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parent.parent.parent / "bench"


@pytest.fixture
def convergence(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(BENCH))
    spec = importlib.util.spec_from_file_location("convergence", BENCH / "convergence.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    sys.modules.pop("machine", None)


def test_the_exact_run_is_the_dense_run_and_the_detached_one_is_not(convergence, tmp_path):
    runs = {name: [convergence.run(name, 0, 4)] for name in convergence.CONTENDERS}
    dense, exact, detached = (runs[name][0] for name in convergence.CONTENDERS)
    assert exact["reward"] == pytest.approx(dense["reward"])
    assert exact["loss"] == pytest.approx(dense["loss"], abs=1e-5)
    assert detached["gradient_error"][0] > 0.1
    convergence.draw(runs, tmp_path / "curves.png")
    assert (tmp_path / "curves.png").stat().st_size > 1000
