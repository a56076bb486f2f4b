"""kill -9 at random instants: what was flushed is there, every hit is right, no byte leaks."""

from __future__ import annotations

import re

import pytest
from disk_pages import run_python

CYCLES = 30
# Of one cycle: a second on an idle machine, and most of it starts processes, which a busy one puts off.
CYCLE_S = 30
pytestmark = pytest.mark.timeout(CYCLES * CYCLE_S + 60)

CODE = """
import sys
from pathlib import Path
from disk_crash import torture
print(torture(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])))
"""


def tortured(tmp_path, seed: int) -> tuple[int, int, int]:
    """Kills, hits that were compared, and how many of them were promised."""
    said = run_python(CODE, tmp_path / "store", CYCLES, seed, timeout_s=CYCLES * CYCLE_S)
    print(said)  # noqa: T201 - the counts, shown with -rP
    found = re.fullmatch(r"(\d+) kills, (\d+) hits compared, (\d+) of them promised\n", said)
    assert found, said
    return int(found[1]), int(found[2]), int(found[3])


def test_thirty_kills(tmp_path):
    kills, hits, promised = tortured(tmp_path, 1)
    assert kills == CYCLES
    assert hits >= promised > kills


@pytest.mark.long
@pytest.mark.parametrize("part", range(10))
def test_three_hundred_kills(tmp_path, part):
    kills, hits, promised = tortured(tmp_path, 1000 * (part + 1))
    assert kills == CYCLES
    assert hits >= promised > kills
