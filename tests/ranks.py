"""Running a program under torchrun."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parent


def run_ranks(program: str, num_ranks: int, *arguments: Path, timeout_s: float = 280) -> None:
    """Runs a program of this folder on so many processes of this machine; fails with what they said."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}"]
    done = subprocess.run(
        [*launch, str(TESTS / program), *map(str, arguments)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(TESTS)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
