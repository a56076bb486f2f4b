"""The convergence benchmark runs, and its exact run is its dense run."""

import pytest


def test_the_exact_run_is_the_dense_run_and_the_detached_one_is_not(bench, tmp_path):
    convergence = bench("convergence")
    runs = {name: [convergence.run(name, 0, 4)] for name in convergence.CONTENDERS}
    dense, exact, detached = (runs[name][0] for name in convergence.CONTENDERS)
    assert exact["reward"] == pytest.approx(dense["reward"])
    assert exact["loss"] == pytest.approx(dense["loss"], abs=1e-5)
    assert detached["gradient_error"][0] > 0.1
    convergence.draw(runs, tmp_path / "curves.png")
    assert (tmp_path / "curves.png").stat().st_size > 1000
