"""`tiercache plan`: what a job takes on a machine, before renting it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    import torch

app = typer.Typer()


@app.command()
def plan(
    model: Annotated[
        str, typer.Option(help="Folder or config.json of a Transformers model; no weights are read.")
    ],
    prompt_tokens: Annotated[int, typer.Option(help="Tokens of the shared prompt.")],
    tail_tokens: Annotated[int, typer.Option(help="Tokens of each branch after it.")],
    branches: Annotated[int, typer.Option(help="Branches over the prompt, on all devices together.")],
    hardware: Annotated[
        str, typer.Option(help="A preset such as 8xH20 or H200, or a file of `tiercache profile --json`.")
    ],
    device: Annotated[str | None, typer.Option(help="Budget of the device tier; chosen by default.")] = None,
    host: Annotated[
        str | None, typer.Option(help="Budget of each rank's host tier; 80 % of its share by default.")
    ] = None,
    disk: Annotated[str, typer.Option(help="Budget of each rank's disk tier.")] = "0",
    host_memory: Annotated[
        str | None, typer.Option(help="Memory of the whole host; 256 GB a card of a preset.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="Of the weights.")] = "bfloat16",
    optimizer: Annotated[
        str, typer.Option(help="Whose state lies on the device: adamw, sgd or none.")
    ] = "adamw",
    json_file: Annotated[Path | None, typer.Option("--json", help="Write all figures.")] = None,
) -> None:
    """Plan a job: memory, traffic and time of each prefix_activations choice, what bounds it, what to use."""
    from rich.console import Console

    from tiercache.cli.plan_table import plan_document, print_plan
    from tiercache.config import parse_size
    from tiercache.measure.machine import this_machine
    from tiercache.runtime.planning.hardware import find_hardware
    from tiercache.runtime.planning.model import load_config
    from tiercache.runtime.planning.planner import Job, plan_job

    job = Job(
        prompt_tokens=prompt_tokens,
        tail_tokens=tail_tokens,
        branches=branches,
        dtype=_dtype(dtype),
        optimizer=optimizer,
    )
    machine = find_hardware(hardware, _size(host_memory, "host_memory"))
    machine.profile.warn_unless_of(this_machine())
    with Console(stderr=True).status("walking a step without weights"):
        planned = plan_job(
            load_config(model),
            job,
            machine,
            device=_size(device, "device"),
            host=_size(host, "host"),
            disk=parse_size(disk, "disk"),
        )
    print_plan(planned, Console(width=118))
    if json_file is not None:
        json_file.write_text(json.dumps(plan_document(planned), indent=1) + "\n")
    if planned.recommended is None:
        raise typer.Exit(1)


def _size(text: str | None, what: str) -> int | None:
    from tiercache.config import parse_size

    return None if text is None else parse_size(text, what)


def _dtype(name: str) -> torch.dtype:
    import torch

    from tiercache.errors import ConfigError

    kind = getattr(torch, name, None)
    if not isinstance(kind, torch.dtype) or not kind.is_floating_point:
        raise ConfigError("plan: dtype", got=name, limit="bfloat16, float16, float32 or float64")
    return kind
