"""Ranks that share a tree give the gradient of one process; a rank that fails takes the others down."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parent.parent / "rank_program.py"


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_follow_one_process_and_fail_together(ranks: int, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    done = subprocess.run(
        [*command, str(PROGRAM), str(tmp_path)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(PROGRAM.parent)},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert (tmp_path / "done").exists()
    assert len(list(tmp_path.glob("rank-*/*"))) == 2 * ranks
