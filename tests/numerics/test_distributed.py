"""Ranks that share a tree give the gradient of one process; a rank that fails takes the others down."""

from __future__ import annotations

from pathlib import Path

import pytest
from ranks import run_ranks


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_follow_one_process_and_fail_together(ranks: int, tmp_path: Path) -> None:
    run_ranks("rank_program.py", ranks, tmp_path)
    assert (tmp_path / "done").exists()
    assert len(list(tmp_path.glob("rank-*/*"))) == 2 * ranks
