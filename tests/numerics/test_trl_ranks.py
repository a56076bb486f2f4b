"""TRL's trainers over stores, under DDP."""

from __future__ import annotations

from pathlib import Path

import tiny_trl
from ranks import run_ranks

pytestmark = tiny_trl.WARNINGS


def test_two_ranks_follow_trl_under_ddp(tmp_path: Path) -> None:
    model = tiny_trl.save_model(tmp_path / "model")
    run_ranks("trl_ranks.py", 2, tmp_path, model)
    assert len(list(tmp_path.glob("Tier*Trainer-*-of-2"))) == 4
