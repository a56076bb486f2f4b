"""`tiercache tune`: policies, parameters and admission for the tiers that a trace will meet."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tiercache.cli.trace_options import Columns, Figures, Format, Resize, Speeds

if TYPE_CHECKING:
    from tiercache.policies.tune import Tuned

app = typer.Typer()


@app.command()
def tune(
    trace: Annotated[
        Path, typer.Argument(help="A recorded trace: open_store(trace=PATH), or any format of simulate.")
    ],
    device: Annotated[str, typer.Option(help="Budget of the device tier.")] = "8GiB",
    host: Annotated[str, typer.Option(help="Budget of the host tier; 0 for none.")] = "0",
    disk: Annotated[str, typer.Option(help="Budget of the disk tier; 0 for none.")] = "0",
    disk_directory: Annotated[
        Path | None, typer.Option(help="Directory that the configuration names.")
    ] = None,
    profile: Speeds = None,
    known_future: Annotated[
        bool, typer.Option(help="Runs follow a plan: oracle policies may be chosen.")
    ] = False,
    held_out: Annotated[float, typer.Option(help="Last share of the trace, which only judges.")] = 0.3,
    format: Format = None,  # noqa: A002
    columns: Columns = None,
    resize: Resize = None,
    out: Annotated[Path, typer.Option(help="The configuration file (TOML).")] = Path("tiercache.toml"),
    json_file: Figures = None,
) -> None:
    """Search policies, their parameters and admission per tier; write a file for open_store(config=FILE)."""
    from rich.console import Console

    from tiercache.cli.simulate_command import parse_columns
    from tiercache.config import parse_size
    from tiercache.policies.profiles import read_profile
    from tiercache.policies.traces import read_trace
    from tiercache.policies.tune import tune as search
    from tiercache.policies.tune import write_config

    console = Console(stderr=True)
    budgets = {"device": device, "host": host, "disk": disk}
    capacities = {name: parse_size(text, name) for name, text in budgets.items()}
    with console.status("reading the trace") as status:
        tuned = search(
            read_trace(trace, format=format, resize=resize, columns=parse_columns(columns)),  # type: ignore[arg-type]
            capacities,
            read_profile(profile),
            known_future=known_future,
            held_out=held_out,
            progress=status.update,
        )
    options: dict[str, object] = {"device": device}
    if capacities["host"]:
        options["host"] = host
    comment = f"Written by tiercache tune for {trace.name}."
    if capacities["disk"] and disk_directory is not None:
        options |= {"disk": str(disk_directory), "disk_capacity": disk}
    elif capacities["disk"]:
        comment += f" It counts on a disk tier of {disk}: open_store(config=FILE, disk=DIRECTORY, disk_capacity=SIZE)."
    default, chosen = tuned.held_out
    gain = f"held-out {held_out:.0%}: {default:.4g} s of stall by default, {chosen:.4g} s with these policies"
    out.write_text(write_config(tuned, options, f"{comment}\n{gain}."))
    _print(tuned, gain, out)
    if json_file is not None:
        json_file.write_text(json.dumps(_document(tuned), indent=1))


def _print(tuned: Tuned, gain: str, out: Path) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(width=110)
    table = Table(title="best of the last round, by tier")
    for heading in ("tier", "candidate", "stall s"):
        table.add_column(heading, justify="right" if heading == "stall s" else "left")
    for name, scored in tuned.table.items():
        for choice, stall in scored[:5]:
            table.add_row(name, str(choice), f"{stall:.4g}")
    console.print(table)
    console.print(f"{gain}\nwritten: {out}", soft_wrap=True)


def _document(tuned: Tuned) -> dict[str, object]:
    return {
        "tiers": [
            {
                "name": tier.name,
                "policy": tier.policy,
                "params": dict(tier.params),
                "admission": tier.admission,
                "admission_limit": tier.admission_limit,
            }
            for tier in tuned.tiers
        ],
        "train_stall_s": {"default": tuned.train[0], "tuned": tuned.train[1]},
        "held_out_stall_s": {"default": tuned.held_out[0], "tuned": tuned.held_out[1]},
        "table": {
            name: [[str(choice), stall] for choice, stall in rows] for name, rows in tuned.table.items()
        },
    }
