"""`tiercache profile`: what this machine's tiers, codecs and arithmetic can do."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.table import Table

    from tiercache.profile import Profile

app = typer.Typer()


@app.command()
def profile(
    disk: Annotated[
        list[Path] | None,
        typer.Option(help="Directory of the disk tier, one a drive; takes 1 GiB of each for a while."),
    ] = None,
    json_file: Annotated[
        Path | None,
        typer.Option("--json", help="The profile file that plan, tune, simulate and runs read."),
    ] = None,
    figure: Annotated[Path | None, typer.Option(help="Draw the roofline: PNG, PDF or SVG.")] = None,
    seconds: Annotated[float, typer.Option(help="Least time of each figure.")] = 0.3,
) -> None:
    """Measure tiers, codecs and arithmetic, each alone and together with compute; about a minute."""
    from rich.console import Console

    from tiercache.config import check_directory
    from tiercache.errors import ConfigError
    from tiercache.measure.timing import Budget
    from tiercache.measure.whole import measure_profile
    from tiercache.roofline import plot_roofline
    from tiercache.runtime.speed import attention_kernels

    if not seconds > 0:
        raise ConfigError("profile: seconds", got=seconds, limit="> 0")
    for directory in disk or ():
        check_directory(directory)
    with Console(stderr=True).status("measuring") as status:
        found = measure_profile(
            attention_kernels(),
            directories=disk or (),
            budget=Budget(seconds=seconds),
            progress=lambda what: status.update(f"measuring {what}"),
        )
    console = Console(width=110)
    for table in (_compute_table(found), _copies_table(found), _codec_table(found), _bound_table(found)):
        console.print(table)
    if json_file is not None:
        found.save(json_file)
    if figure is not None:
        plot_roofline(found, figure)


def _table(title: str, *headings: str) -> Table:
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for number, heading in enumerate(headings):
        table.add_column(heading, justify="right" if number else "left")
    return table


def _compute_table(found: Profile) -> Table:
    table = _table("arithmetic, Gflop/s", "dtype", "matrix products", "attention", "its backward")
    for name, speed in found.compute.items():
        rates = (speed.matmul_flops_per_s, speed.attention_flops_per_s, speed.attention_backward_flops_per_s)
        table.add_row(name, *(f"{rate / 1e9:,.0f}" for rate in rates))
    moved, op_us = found.memory_bytes_per_s / 1e9, found.op_s * 1e6
    table.caption = f"elementwise work moves {moved:.1f} GB/s; an operator costs {op_us:.1f} us"
    return table


_TOGETHER = ("speed kept beside compute", "compute kept beside it")


def _copies_table(found: Profile) -> Table:
    table = _table("copies", "", "read GB/s", "write GB/s", "read us", "write us", *_TOGETHER)
    for name, speed in {
        **found.parts,
        **{f"tier {name}": speed for name, speed in found.tiers.items()},
    }.items():
        table.add_row(
            name,
            *(f"{rate / 1e9:.2f}" for rate in (speed.read_bytes_per_s, speed.write_bytes_per_s)),
            *(f"{latency * 1e6:.0f}" for latency in (speed.read_latency_s, speed.write_latency_s)),
            *(f"{share:.0%}" for share in (speed.beside_compute, speed.compute_share)),
        )
    return table


def _codec_table(found: Profile) -> Table:
    table = _table("codecs on one core", "codec", "ratio", "encode GB/s", "decode GB/s", *_TOGETHER)
    for name, codec in found.codecs.items():
        table.add_row(
            name,
            f"{codec.ratio:.3f}",
            *(f"{rate / 1e9:.2f}" for rate in (codec.encode_bytes_per_s, codec.decode_bytes_per_s)),
            *(f"{share:.0%}" for share in (codec.beside_compute, codec.compute_share)),
        )
    return table


def _bound_table(found: Profile) -> Table:
    from tiercache.roofline import Model, tokens_to_hide

    model = Model()
    title = (
        f"an 8B model over {model.prompt_tokens:,} tokens: tail tokens of a visit that hide its pages' way up"
    )
    table = _table(title, "from tier", "keys and values", "and gradient pages")
    for tier in found.tiers:
        table.add_row(
            tier, *(f"{tokens_to_hide(found, model, tier, sums=sums):,.0f}" for sums in (False, True))
        )
    return table
