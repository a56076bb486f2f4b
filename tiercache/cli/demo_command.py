"""`tiercache demo`: the same training step twice, dense and through the store, gradients compared."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tiercache.cli.demo.settings import DemoSettings
from tiercache.errors import ConfigError

if TYPE_CHECKING:
    from tiercache.cli.demo.race import SideResult

app = typer.Typer()

_TOUCHED_BYTES = 4 << 30  # beyond what the steps take, for the kernel need not give the same memory again


@app.command()
def demo(
    model: Annotated[
        str | None,
        typer.Option(metavar="PATH_OR_ID", help="A Transformers causal LM instead of the embedded one."),
    ] = None,
    gguf: Annotated[
        str | None, typer.Option(metavar="FILE", help="A GGUF file with the weights of one.")
    ] = None,
    prompt_tokens: Annotated[int, typer.Option(help="Length of the shared prompt.")] = 4096,
    branches: Annotated[int, typer.Option(help="Rows of the group.")] = 8,
    tail_tokens: Annotated[int, typer.Option(help="Scored tokens of each row.")] = 64,
    device_budget: Annotated[str, typer.Option(help="Budget of the device tier.")] = "16MiB",
    host_budget: Annotated[str, typer.Option(help="Budget of the host tier.")] = "24MiB",
    disk: Annotated[
        str | None, typer.Option(metavar="DIR", help="Folder of the disk tier; a temporary one by default.")
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write what was measured.")
    ] = None,
    figure: Annotated[Path, typer.Option(metavar="FILE", help="Where the PNG goes.")] = Path("demo.png"),
) -> None:
    """Run one GRPO-like step over one long prompt, dense and through device, host and disk tiers.

    Prints a table, writes a figure of memory over time, and ends with status 1 when the gradients disagree.
    """
    for option, file in (("--figure", figure), ("--json", json_file)):
        if file is not None and not file.absolute().parent.is_dir():
            raise ConfigError(option, got=file, limit="a file in a folder that exists")
    with tempfile.TemporaryDirectory(prefix="tiercache-demo-") as scratch:
        settings = DemoSettings(
            model=model,
            gguf=gguf,
            prompt_tokens=prompt_tokens,
            branches=branches,
            tail_tokens=tail_tokens,
            device_budget=device_budget,
            host_budget=host_budget,
            disk=disk if disk is not None else f"{scratch}/disk",
        )
        agree = _run(settings, Path(scratch), json_file, figure)
    if not agree:
        raise typer.Exit(1)


def _run(settings: DemoSettings, folder: Path, json_file: Path | None, figure: Path) -> bool:
    from rich.console import Console

    from tiercache.cli.demo.figure import draw
    from tiercache.cli.demo.table import results_table
    from tiercache.cli.demo.verdict import LARGEST_DIFFERENCE, as_json, compare
    from tiercache.measure.first_touch import touch_memory

    console = Console(highlight=False)
    console.print(_headline(settings))
    touch_memory(_TOUCHED_BYTES)  # neither side is to pay for what this machine has yet to get from its host
    # ours first: a budget or folder that the store refuses is then said before dense training took its time
    ours, dense = (_run_with_bar(side, settings, folder, console) for side in ("tiercache", "dense"))
    verdict = compare(dense, ours)
    console.print(results_table(settings, dense, ours, verdict))
    draw(figure, settings, dense, ours)
    console.print(f"Figure: {figure}")
    if json_file is not None:
        json_file.write_text(json.dumps(as_json(settings, dense, ours, verdict), indent=1) + "\n")
        console.print(f"Figures as JSON: {json_file}")
    apart = f"{verdict.gradient_difference:.1e} apart, limit {LARGEST_DIFFERENCE:.0e}"
    console.print(
        f"The gradients agree: {apart}." if verdict.exact else f"[red]The gradients disagree[/red]: {apart}."
    )
    return verdict.exact


def _headline(settings: DemoSettings) -> str:
    model = settings.model or settings.gguf or "a small Llama over bytes"
    return (
        f"{model}, fp32: {settings.branches} branches of {settings.tail_tokens} tokens over one prompt of "
        f"{settings.prompt_tokens} tokens; budgets: device {settings.device_budget}, "
        f"host {settings.host_budget}, disk {settings.disk_capacity}"
    )


def _run_with_bar(side: str, settings: DemoSettings, folder: Path, console: Any) -> SideResult:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from tiercache.cli.demo.race import run_side

    columns = [
        TextColumn("{task.description:<16}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("branches"),
        TimeElapsedColumn(),
    ]
    label = "dense training" if side == "dense" else side
    with Progress(*columns, console=console) as bar:
        task = bar.add_task(label, total=settings.branches)
        return run_side(
            side, settings, folder, lambda done, total: bar.update(task, completed=done, total=total)
        )
