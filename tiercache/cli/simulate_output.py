"""What `tiercache simulate` shows: a table, curves, and whether a recorded store's victims come out again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def print_rows(rows: list[dict[str, Any]], requests: int, pages: int, timed: bool) -> None:
    """A table of all runs on stdout, one order of policies everywhere."""
    from rich.console import Console
    from rich.table import Table

    from tiercache.policies.plots import ordered, size_label

    table = Table(title=f"{requests} requests, {pages} pages")
    for heading in (
        "capacity",
        "policy",
        "misses",
        "bytes",
        "cost",
        "optimum",
        "regret",
        "stall s",
        "moved up",
        "down",
    ):
        table.add_column(heading, justify="left" if heading in ("capacity", "policy") else "right")
    ranks = {name: i for i, name in enumerate(ordered(list({row["policy"] for row in rows})))}
    for row in sorted(rows, key=lambda row: (row["capacity_bytes"], ranks[row["policy"]])):
        sign = "" if row["optimum_method"] == "exact" else "≥ "
        table.add_row(
            size_label(row["capacity_bytes"]),
            row["policy"],
            f"{row['miss_ratio']:.4f}" + f" ± {row['miss_ratio_error']:.4f}" * (row["miss_ratio_error"] > 0),
            f"{row['byte_miss_ratio']:.4f}",
            f"{row['cost_miss_ratio']:.4f}",
            f"{sign}{row['optimum_miss_ratio']:.4f}",
            f"{row['regret']:.4f}",
            f"{row['stall_s']:.4g}" if timed else "-",
            " + ".join(size_label(n) for n in row["moved_up_bytes"]),
            " + ".join(size_label(n) for n in row["moved_down_bytes"]) or "-",
        )
    Console(width=140).print(table)


def plot_rows(rows: list[dict[str, Any]], path: Path, title: str) -> None:
    """Miss-ratio curves as PNG, with bands where pages were sampled, and the optimum."""
    import numpy as np

    from tiercache.policies.curves import Curve
    from tiercache.policies.plots import OPTIMUM, draw_curves, save

    def curve(name: str, chosen: list[dict[str, Any]], prefix: str) -> Curve:
        chosen = sorted(chosen, key=lambda row: row["capacity_bytes"])
        return Curve(
            name,
            np.array([row["capacity_bytes"] for row in chosen]),
            np.array([row[f"{prefix}miss_ratio"] for row in chosen]),
            np.array([row[f"{prefix}byte_miss_ratio"] for row in chosen]),
            np.array([0.0 if prefix else row["miss_ratio_error"] for row in chosen]),
        )

    names = list(dict.fromkeys(row["policy"] for row in rows))
    curves = [curve(name, [row for row in rows if row["policy"] == name], "") for name in names]
    once = list({row["capacity_bytes"]: row for row in rows}.values())
    save(draw_curves([*curves, curve(OPTIMUM, once, "optimum_")], f"Miss ratio, {title}"), path)


def print_replay(trace: Path, json_file: Path | None) -> None:
    """Asks the policies of a recorded store again, by tier. Raises PolicyError when a victim differs."""
    from rich.console import Console
    from rich.table import Table

    from tiercache.errors import PolicyError
    from tiercache.policies.recorded import read_recorded, replay

    table = Table("tier", "policy", "choices", "victims", "identical")
    rows: list[dict[str, Any]] = []
    for recorded in read_recorded(trace):
        victims, admitted = replay(recorded)
        same = sum(a == b for a, b in zip(victims, recorded.victims, strict=True))
        row = {
            "tier": recorded.tier,
            "policy": recorded.policy,
            "choices": len(victims),
            "victims": sum(map(len, victims)),
            "identical": same,
            "admissions_identical": admitted == recorded.admitted,
        }
        rows.append(row)
        table.add_row(*(str(row[name]) for name in ("tier", "policy", "choices", "victims", "identical")))
    Console(width=110).print(table)
    if json_file is not None:
        json_file.write_text(json.dumps({"trace": str(trace), "replay": rows}, indent=1))
    differ = [
        row["tier"] for row in rows if row["identical"] < row["choices"] or not row["admissions_identical"]
    ]
    if differ:
        raise PolicyError("replay: other victims than recorded", got=", ".join(map(str, differ)))
