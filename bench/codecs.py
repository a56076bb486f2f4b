"""Codecs on real tensors: ratio and speed of ours and of others on one core, entropy bounds, gain on the disk.

    python bench/codecs.py --json FILE [--quick] [--cpu N] [--dir DIR] [--tensors FILE]

Tensors of one layer of SmolLM2-135M reading English text, about 8 MB each, captured once and kept in --tensors.
One process pinned to --cpu, one thread; contenders take turns and figures are medians of the rounds. The disk part
runs on all cores, in --dir. `pip install 'tiercache[bench]'` brings the others.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from codec_bounds import bounds
from codec_contenders import Contender, contenders, page_bytes
from codec_disk import disk_gain
from machine import describe_machine
from tensors import cached

WINDOWS = 11
TARGET_BYTES = 8_000_000
NAMES = ("k", "k_rotary", "v", "residual", "norm", "mlp", "attention", "k_grad", "v_grad", "residual_grad")
GOALS = {
    "exponent_vs_zipnn_ratio_min": 1.0,
    "exponent_encode_x_zipnn": 5.0,
    "exponent_decode_x_zipnn": 2.5,
    "window_decode_gbps": 10.0,
    "bound_fraction": 0.93,
    "effective_disk_gain": 1.35,
}


def pages_of(path: Path) -> dict[str, torch.Tensor]:
    """The tensors, each cut to the fewest windows that reach 8 MB."""
    pages = {}
    for name, tensor in cached(path, WINDOWS).items():
        if name in NAMES:
            window = tensor[0].nbytes
            pages[name] = tensor[: min(len(tensor), -(-TARGET_BYTES // window))].contiguous()
    return pages


def measure(page: torch.Tensor, field: list[Contender], rounds: int) -> dict[str, dict[str, float]]:
    """Ratio and speeds of every contender on one page, taking turns."""
    times: dict[str, dict[str, list[float]]] = {c.name: {"encode": [], "decode": []} for c in field}
    sizes: dict[str, int] = {}
    want = page_bytes(page).tobytes()
    for turn in range(rounds + 1):
        for contender in field:
            begin = time.perf_counter()
            payload, size = contender.pack(page)
            middle = time.perf_counter()
            back = contender.unpack(payload, page)
            end = time.perf_counter()
            if turn == 0:
                sizes[contender.name] = size
                if contender.lossless:
                    assert bytes(back) == want, contender.name
                continue
            times[contender.name]["encode"].append(middle - begin)
            times[contender.name]["decode"].append(end - middle)
    return {
        name: {
            "ratio": page.nbytes / sizes[name],
            "encode_gbps": page.nbytes / statistics.median(taken["encode"]) / 1e9,
            "decode_gbps": page.nbytes / statistics.median(taken["decode"]) / 1e9,
        }
        for name, taken in times.items()
    }


def tensor_fields(page: torch.Tensor, measured: dict[str, dict[str, float]]) -> dict[str, Any]:
    """A tensor's figures and its bounds."""
    bound = bounds(page)
    ours = measured["exponent"]
    fields: dict[str, Any] = {"shape": list(page.shape), "contenders": measured, "bounds": bound}
    fields["bound_fraction"] = (1 - 1 / ours["ratio"]) / (1 - 1 / bound["predicted"])
    if "zipnn" in measured:
        theirs = measured["zipnn"]
        fields["exponent_vs_zipnn_ratio"] = ours["ratio"] / theirs["ratio"]
        fields["exponent_encode_x_zipnn"] = ours["encode_gbps"] / theirs["encode_gbps"]
        fields["exponent_decode_x_zipnn"] = ours["decode_gbps"] / theirs["decode_gbps"]
    return fields


def summary(tensors: dict[str, dict[str, Any]], disk: dict[str, Any]) -> dict[str, float]:
    """The figures that the goals are about."""
    each = list(tensors.values())
    window = [fields["contenders"]["window"] for fields in each]
    result = {
        "window_decode_gbps": statistics.median(w["decode_gbps"] for w in window),
        "window_encode_gbps": statistics.median(w["encode_gbps"] for w in window),
        "window_ratio_min": min(w["ratio"] for w in window),
        "exponent_encode_gbps": statistics.median(f["contenders"]["exponent"]["encode_gbps"] for f in each),
        "exponent_decode_gbps": statistics.median(f["contenders"]["exponent"]["decode_gbps"] for f in each),
        "bound_fraction": min(fields["bound_fraction"] for fields in each),
        "effective_disk_gain": disk["effective_disk_gain"],
    }
    if all("exponent_vs_zipnn_ratio" in fields for fields in each):
        result["exponent_vs_zipnn_ratio_min"] = min(fields["exponent_vs_zipnn_ratio"] for fields in each)
        for what in ("exponent_encode_x_zipnn", "exponent_decode_x_zipnn"):
            result[what] = statistics.median(fields[what] for fields in each)
    return result


def report(tensors: dict[str, dict[str, Any]], totals: dict[str, float]) -> None:
    """A table a tensor, then the summary beside its goals."""
    for name, fields in tensors.items():
        bound = fields["bounds"]
        print(f"\n{name} {fields['shape']}: bound {bound['plain']:.3f}, predicted {bound['predicted']:.3f}")
        for contender, m in fields["contenders"].items():
            speeds = f"{m['encode_gbps']:6.2f} {m['decode_gbps']:6.2f} GB/s"
            print(f"  {contender:24} {m['ratio']:6.3f}  {speeds}")
    print()
    for name, value in totals.items():
        goal = GOALS.get(name)
        print(
            f"{name:30} {value:7.3f}"
            + (f"  goal {goal}{'' if value >= goal else '  MISSED'}" if goal else "")
        )


def main() -> None:
    """Runs the benchmark from the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, required=True, help="where the figures go")
    parser.add_argument("--quick", action="store_true", help="fewer rounds, same tensors")
    parser.add_argument("--cpu", type=int, default=max(os.sched_getaffinity(0)), help="the core to pin to")
    parser.add_argument("--dir", help="directory on the drive to measure; default: the temporary one")
    default = Path(tempfile.gettempdir()) / "tiercache-bench" / f"tensors-{WINDOWS}.safetensors"
    parser.add_argument("--tensors", type=Path, default=default, help="where captured tensors are kept")
    arguments = parser.parse_args()
    pages = pages_of(arguments.tensors)
    everywhere = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {arguments.cpu})
    torch.set_num_threads(1)
    field, missing = contenders()
    rounds = 5 if arguments.quick else 15
    tensors = {name: tensor_fields(page, measure(page, field, rounds)) for name, page in pages.items()}
    os.sched_setaffinity(0, everywhere)
    kinds = {name: list(pages[name]) for name in ("k", "v", "residual")}
    disk = disk_gain(kinds, 6, arguments.dir, 8 if arguments.quick else 60)
    totals = summary(tensors, disk)
    report(tensors, totals)
    result = {"machine": describe_machine(), "goals": GOALS, "missing": missing, "disk": disk}
    arguments.json.write_text(json.dumps({**result, "tensors": tensors, **totals}, indent=1) + "\n")


if __name__ == "__main__":
    main()
