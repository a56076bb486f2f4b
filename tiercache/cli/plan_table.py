"""A plan as tables in the terminal and as JSON."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from tiercache.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from tiercache.runtime.planning.planner import Choice, Planned


def print_plan(planned: Planned, console: Console) -> None:
    """Prints memory and time of each choice, and the settings of the recommended one."""
    job, outline = planned.job, planned.outline
    console.print(
        f"{outline.name}, {outline.num_parameters / 1e9:.2f} B parameters in {str(outline.dtype)[6:]}; "
        f"{job.branches} branches of {job.tail_tokens:,} tokens over {job.prompt_tokens:,}; {planned.hardware.name}",
        soft_wrap=True,
        highlight=False,
    )
    able = [choice for choice in planned.choices if not choice.faults]
    if able:
        console.print(_memory_table(able))
        console.print(_time_table(able))
    if len(able) < len(planned.choices):
        console.print(_needs_table([choice for choice in planned.choices if choice.faults]))
    for choice in planned.choices:
        for fault in choice.faults:
            console.print(f"{choice.name} cannot run: {fault}", soft_wrap=True, highlight=False)
    best = planned.recommended
    if best is None:
        console.print("no plan: nothing above can run on this machine", highlight=False)
    else:
        console.print(f"use: {_settings_text(best)}", soft_wrap=True, highlight=False)
    for note in planned.notes:
        console.print(f"note: {note}", soft_wrap=True, highlight=False)


def _memory_table(choices: list[Choice]) -> Table:
    table = Table(title="memory of one rank")
    table.add_column("prefix_activations")
    for heading in ("device peak", "weights", "optimizer", "sums", "visit", "store", "host", "disk"):
        table.add_column(heading, justify="right")
    for choice in choices:
        held, tiers = choice.device_bytes, choice.estimate.tier_bytes
        parts = [held[what] for what in ("weights", "optimizer", "sums", "visit", "store")]
        table.add_row(
            choice.name,
            *(format_bytes(n) for n in (choice.peak_device_bytes, *parts, tiers["host"], tiers["disk"])),
        )
    return table


def _needs_table(choices: list[Choice]) -> Table:
    """Of choices that cannot run: what they would take, and nothing that could be mistaken for a plan."""
    table = Table(title="cannot run: what one rank would hold and compute")
    table.add_column("prefix_activations")
    kinds = ("pages", "gradient pages", "kept")
    for heading in ("weights", "sums", "optimizer", *kinds, "capture FLOP", "step FLOP"):
        table.add_column(heading, justify="right")
    for choice in choices:
        held, phases = choice.device_bytes, choice.estimate.phases
        sizes: list[float] = [held[what] for what in ("weights", "sums", "optimizer")]
        sizes += [choice.estimate.page_parts[kind] for kind in kinds]
        flops = [phase.work.matmul_flops + phase.work.attention_flops for phase in phases.values()]
        row = [*(format_bytes(n) for n in sizes), f"{flops[0]:.2e}", f"{sum(flops):.2e}"]
        table.add_row(choice.name, *row)
    return table


def _time_table(choices: list[Choice]) -> Table:
    table = Table(title="one step of one rank")
    for heading in ("prefix_activations", "phase", "bound by"):
        table.add_column(heading)
    for heading in ("time", "compute", "copies", "down", "up", "to disk", "from disk"):
        table.add_column(heading, justify="right")
    directions = ("device->host", "host->device", "host->disk", "disk->host")
    for choice in choices:
        for name, phase in choice.estimate.phases.items():
            table.add_row(
                choice.name if name == "capture" else "",
                name,
                phase.bound,
                *(format_seconds(s) for s in (phase.seconds, phase.work.seconds, phase.transfer_s)),
                *(format_bytes(phase.bytes_moved.get(d, 0.0)) for d in directions),
            )
        table.add_row("", "step", "", format_seconds(choice.estimate.seconds), end_section=True)
    return table


def _settings_text(choice: Choice) -> str:
    settings = choice.settings
    store = [f'device="{settings["device"]}"']
    if settings["host"]:
        store.append(f'host="{settings["host"]}"')
    if settings["disk_capacity"]:
        store.append(f'disk=DIRECTORY, disk_capacity="{settings["disk_capacity"]}"')
    return (
        f'open_store({", ".join(store)}) and prefix_activations="{settings["prefix_activations"]}", '
        f"max_node_tokens={settings['max_node_tokens']}, max_visit_tokens={settings['max_visit_tokens']}"
    )


def plan_document(planned: Planned) -> dict[str, Any]:
    """All figures, for JSON: bytes and seconds."""
    job, outline, hardware = planned.job, planned.outline, planned.hardware
    return {
        "model": asdict(outline) | {"dtype": str(outline.dtype)[6:]},
        "job": asdict(job) | {"dtype": str(job.dtype)[6:]},
        "hardware": {
            "name": hardware.name,
            "source": hardware.source,
            "num_devices": hardware.num_devices,
            "device_bytes": hardware.device_bytes,
            "host_bytes": hardware.host_bytes,
            "profile": hardware.profile.as_dict(),
        },
        "recommended": planned.recommended.settings if planned.recommended is not None else None,
        "choices": {choice.name: _choice_document(choice) for choice in planned.choices},
        "notes": planned.notes,
    }


def _choice_document(choice: Choice) -> dict[str, Any]:
    estimate = choice.estimate
    return {
        "feasible": not choice.faults,
        "faults": choice.faults,
        "settings": choice.settings if not choice.faults else None,
        "peak_device_bytes": choice.peak_device_bytes,
        "device_bytes": choice.device_bytes,
        "tier_bytes": estimate.tier_bytes,
        "page_bytes": estimate.page_bytes,
        "page_parts": estimate.page_parts,
        "num_visits": estimate.num_visits,
        "seconds": estimate.seconds,
        "phases": {
            name: {
                "seconds": phase.seconds,
                "tokens": phase.tokens,
                "compute": asdict(phase.work),
                "transfer_s": phase.transfer_s,
                "bytes_moved": phase.bytes_moved,
                "bound": phase.bound,
            }
            for name, phase in estimate.phases.items()
        },
    }
