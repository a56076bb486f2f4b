"""What benchmarks share: a job in a process of its own, goals, and the file of results."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from machine import describe_machine

from tiercache.measure.first_touch import touch_memory

_TOUCHED_BYTES = 8 << 30  # beyond what the largest job takes

Goals = dict[str, tuple[str, float]]  # field -> (">=" or "<=", limit)


def run_job(side: Path, name: str, job: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Runs one job in a process of its own and returns what it left.

    Args:
        side: the program, which calls `serve_job`.
        name: of the job; its files in `folder` bear it.
        job: what the program is to do.
        folder: for the job's files.
    """
    path = folder / f"{name}.json"
    path.write_text(json.dumps(job))
    begin = time.perf_counter()
    done = subprocess.run(
        [sys.executable, str(side), str(path)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise SystemExit(f"{name} ended with status {done.returncode}\n{done.stderr[-4000:]}")
    result: dict[str, Any] = json.loads(path.with_suffix(".out.json").read_text())
    steps = ", ".join(f"{run['seconds']:.2f} s {run['peak_bytes'] / 2**30:.2f} GiB" for run in result["runs"])
    print(f"{name:24} {steps} ({time.perf_counter() - begin:.0f} s in all)", flush=True)
    return result


def serve_job(run: Callable[[dict[str, Any], Path], dict[str, Any]]) -> None:
    """Entry of a job's process: carries out the job in the file that the command line names.

    Args:
        run: (job, folder) -> what to leave; "runs" is a list of steps with "seconds" and "peak_bytes".
    """
    path = Path(sys.argv[1])
    path.with_suffix(".out.json").write_text(json.dumps(run(json.loads(path.read_text()), path.parent)))


def missed_goals(fields: dict[str, Any], goals: Goals) -> list[str]:
    """The goals that were not reached, each in a line; what was not measured is not among them."""
    lines = []
    for name, (sign, limit) in goals.items():
        value = fields[name]
        if value is not None and not (value >= limit if sign == ">=" else value <= limit):
            lines.append(f"{name} {value:.3f}, goal {sign} {limit}")
    return lines


class Results:
    """The JSON of a benchmark: the machine as it was at the start, then fields and runs.

    Args:
        benchmark: its name.
        arguments: of the command line: `json`, `quick` and `tiny`.
    """

    def __init__(self, benchmark: str, arguments: argparse.Namespace) -> None:
        self._path: Path = arguments.json
        self._begin = time.perf_counter()
        # No contender is to pay for memory that this machine has yet to get from its host.
        touched_s = 0.0 if arguments.tiny else touch_memory(_TOUCHED_BYTES)
        self._found: dict[str, Any] = {
            "benchmark": benchmark,
            "quick": arguments.quick,
            "tiny": arguments.tiny,
            "machine": {**describe_machine(), "first_touch_s": round(touched_s, 2)},
        }

    def finish(self, fields: dict[str, Any], runs: dict[str, Any], goals: Goals) -> None:
        """Writes the file; prints the fields beside their goals."""
        total_s = time.perf_counter() - self._begin
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_text(
            json.dumps({**self._found, "total_s": total_s, **fields, "runs": runs}, indent=1) + "\n"
        )
        for name, value in fields.items():
            sign, limit = goals.get(name, ("", ""))
            shown = f"{value:14.4g}" if isinstance(value, int | float) else f"{value!s:>14}"
            print(f"{name:36} {shown}  {sign} {limit}".rstrip())
        if not fields:  # only some jobs were run
            print(f"{total_s:.0f} s")
            return
        print(f"{total_s:.0f} s; not reached: {'; '.join(missed_goals(fields, goals)) or 'none'}")
