"""The table that the demo ends with."""

from __future__ import annotations

from rich.table import Table

from tiercache.cli.demo.race import SideResult
from tiercache.cli.demo.settings import DemoSettings
from tiercache.cli.demo.verdict import LARGEST_DIFFERENCE, Verdict, prompt_tokens_run
from tiercache.units import format_bytes


def results_table(settings: DemoSettings, dense: SideResult, ours: SideResult, verdict: Verdict) -> Table:
    """Dense training against tiercache, a figure a row."""
    table = Table(title="One step of the group", title_justify="left", title_style="bold")
    table.add_column()
    for heading in ("dense training", "tiercache", "ratio"):
        table.add_column(heading, justify="right")
    table.add_row(
        "step time",
        f"{dense.step_s:.1f} s",
        f"{ours.step_s:.1f} s",
        _ratio(dense.step_s, ours.step_s, "faster"),
    )
    table.add_row(
        "peak memory of the step",
        format_bytes(dense.peak_bytes),
        format_bytes(ours.peak_bytes),
        _ratio(dense.peak_bytes, ours.peak_bytes, "less"),
    )
    dense_run, ours_run = settings.branches * settings.prompt_tokens, prompt_tokens_run(settings, ours)
    table.add_row(
        "prompt tokens run", f"{dense_run:,}", f"{ours_run:,}", _ratio(dense_run, ours_run, "fewer")
    )
    table.add_section()
    mark = "[green]" if verdict.exact else "[red]"
    table.add_row(
        "gradient difference",
        "",
        f"{mark}{verdict.gradient_difference:.1e}",
        f"limit {LARGEST_DIFFERENCE:.0e}",
    )
    table.add_row("log-prob difference", "", f"{verdict.logp_difference:.1e}", "largest")
    table.add_section()
    for tier in ("device", "host", "disk"):
        peak, capacity = ours.stats["bytes_peak"].get(tier, 0), ours.stats["bytes_capacity"].get(tier, 0)
        table.add_row(f"{tier} tier, peak", "", format_bytes(peak), f"of {format_bytes(capacity)}")
    moved = ours.stats["bytes_moved"]
    for way in sorted(moved):
        if moved[way]:
            table.add_row(f"moved {way.replace('->', ' to ')}", "", format_bytes(moved[way]), "")
    return table


def _ratio(dense: float, ours: float, word: str) -> str:
    if ours <= 0:
        return ""
    return f"{dense / ours:.1f} x {word}"
