"""Everything that needs an accelerator, in one call within 8 minutes: device tests, then timings; writes a JSON.

    python bench/device_check.py --json FILE [--part NAME ...]

Each part runs in a process of its own with a time limit, so one that fails or hangs loses nothing of the others.
A new part is a function that returns figures, and a row of PARTS.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
TOTAL_S = 480


def device_tests(folder: Path) -> dict[str, Any]:
    """The suite's device tests.

    -P: the installed package, not the sources in the working directory. -W: other versions of libraries are at home
    on a device machine, and what they deprecate is not what is tested.
    """
    command = [
        sys.executable,
        "-P",
        "-m",
        "pytest",
        str(ROOT / "tests" / "gpu"),
        "-q",
        "-p",
        "no:cacheprovider",
        "-W",
        "default",
    ]
    done = subprocess.run([*command, f"--basetemp={folder}/tests"], capture_output=True, text=True, cwd=ROOT)
    return {
        "status": done.returncode,
        "passed": done.returncode == 0,
        "tail": done.stdout[-6000:] + done.stderr[-2000:],
    }


def codecs(_folder: Path) -> dict[str, Any]:
    """Device codecs: bits against the host, and speeds on a large page."""
    from device_codecs import codecs_part

    return codecs_part()


def copies(_folder: Path) -> dict[str, Any]:
    """Copies between device and host, pinned and not: what a demotion can reach."""
    from device_codecs import copies_part

    return copies_part()


def replay(folder: Path) -> dict[str, Any]:
    """A training step, dense against tiercache."""
    from device_replay import replay_part

    return replay_part(folder)


# Name, function, seconds. In this order; the limits add up to TOTAL_S.
PARTS: dict[str, tuple[Callable[[Path], dict[str, Any]], int]] = {
    "codecs": (codecs, 90),
    "copies": (copies, 30),
    "tests": (device_tests, 180),
    "replay": (replay, 180),
}


def run_part(name: str) -> dict[str, Any]:
    """One part in a process of its own: its figures, or why there are none."""
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "part.json"
        command = [sys.executable, str(Path(__file__)), "--json", str(target), "--inside", name]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=PARTS[name][1])
            figures = json.loads(target.read_text()) if target.exists() else {"error": done.stderr[-4000:]}
        except subprocess.TimeoutExpired as error:
            said = error.stderr.decode(errors="replace")[-4000:] if isinstance(error.stderr, bytes) else ""
            figures = {"error": f"stopped after {PARTS[name][1]} s", "stderr": said}
    figures["seconds"] = round(time.perf_counter() - begin, 1)
    return figures


def run_inside(name: str, target: Path) -> None:
    """The part itself, in the process that `run_part` started."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            figures = PARTS[name][0](Path(folder))
        except Exception:
            figures = {"error": traceback.format_exc()[-4000:]}
    target.write_text(json.dumps(figures))


def main() -> int:
    """Runs the parts from the command line; 1 when one of them failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, required=True, help="where the figures go")
    parser.add_argument("--part", action="append", choices=list(PARTS), help="only these; default: all")
    parser.add_argument("--inside", choices=list(PARTS), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.inside:
        run_inside(arguments.inside, arguments.json)
        return 0
    from machine import describe_machine

    result: dict[str, Any] = {"machine": describe_machine(), "parts": {}}
    begin = time.perf_counter()
    for name in arguments.part or PARTS:
        result["parts"][name] = run_part(name)
        result["seconds"] = round(time.perf_counter() - begin, 1)
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")  # each part is kept as soon as it ends
        print(name, json.dumps(result["parts"][name], indent=1), flush=True)
    failed = [
        name for name, part in result["parts"].items() if "error" in part or part.get("passed") is False
    ]
    print(f"{len(result['parts'])} parts in {result['seconds']} s; failed: {failed or 'none'}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
