"""`tiercache report`: one HTML page about a trace."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tiercache.cli.trace_options import Columns, Format, Resize

app = typer.Typer()


@app.command()
def report(
    trace: Annotated[Path, typer.Argument(help="A recorded trace, or any format of simulate.")],
    out: Annotated[
        Path | None, typer.Option(help="The page; by default TRACE.html beside the working directory.")
    ] = None,
    policy: Annotated[
        str, typer.Option(help="Policies of the curves, with commas; the first is looked at.")
    ] = "lru,sieve,gdsf",
    capacity: Annotated[
        str | None, typer.Option(help="Sizes of the curves, with commas; by default shares of all bytes.")
    ] = None,
    below: Annotated[str | None, typer.Option(help="Tiers below: host=64GiB:lru,disk=500GiB.")] = None,
    sample: Annotated[float, typer.Option(help="Share of pages that curves are drawn from.")] = 1.0,
    format: Format = None,  # noqa: A002
    columns: Columns = None,
    resize: Resize = None,
) -> None:
    """Make one self-contained HTML page: curves, per-tier traffic over time, reuse distances, early evictions."""
    from rich.console import Console

    from tiercache.cli.simulate_command import parse_below, parse_columns, split_names
    from tiercache.config import parse_size
    from tiercache.policies.report import make_report
    from tiercache.policies.spec import Tier
    from tiercache.policies.traces import read_trace

    loaded = read_trace(trace, format=format, resize=resize, columns=parse_columns(columns))  # type: ignore[arg-type]
    if capacity is None:
        whole = loaded.footprint_bytes
        capacities = sorted({max(1, whole >> shift) for shift in range(7)})
    else:
        capacities = [parse_size(text.strip(), "capacity") for text in capacity.split(",")]
    tiers = [Tier(name=name, capacity_bytes=size, policy=chosen) for name, size, chosen in parse_below(below)]
    target = out or Path(f"{trace.name}.html")
    console = Console(stderr=True)
    with console.status("playing the trace"):
        page = make_report(loaded, split_names(policy), capacities, tiers, sample)
    target.write_text(page)
    Console().print(f"written: {target}", soft_wrap=True)
