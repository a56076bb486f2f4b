"""A step's report as one screen of the terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Group
from rich.table import Table

from tiercache.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from tiercache.runtime.report import StepReport


def report_screen(report: StepReport) -> Group:
    """Time by phase, tokens, traffic by direction with bound and regret, stalls, and peak of each tier."""
    return Group(_tokens(report), _times(report), _traffic(report), _peaks(report))


def _grid(title: str, *headings: str) -> Table:
    table = Table(title=title, title_justify="left", width=72)
    for number, heading in enumerate(headings):
        table.add_column(heading, justify="right" if number else "left", ratio=1)
    return table


def _tokens(report: StepReport) -> Table:
    table = _grid("step", "rows", "nodes", "tokens run", "tokens saved")
    saved = f"{report.tokens_saved:,} ({report.tokens_saved / max(1, report.dense_tokens):.0%})"
    table.add_row(str(report.num_rows), str(report.num_nodes), f"{report.tokens_run:,}", saved)
    return table


def _times(report: StepReport) -> Table:
    table = _grid("time", "phase", "seconds", "share")
    total = report.seconds.get("total", 0.0)
    visits = {kind: s for kind, s in report.seconds.items() if kind != "total"}
    rows = visits | {"other": max(0.0, total - sum(visits.values())), "total": total}
    stalls = {"stalled reads": report.stall_s, "stalled puts": report.put_stall_s}
    for name, seconds in (rows | stalls).items():
        table.add_row(name, format_seconds(seconds), f"{seconds / total:.0%}" if total else "")
    return table


def _traffic(report: StepReport) -> Table:
    table = _grid("traffic", "direction", "bytes")
    for direction, num_bytes in sorted(report.bytes_moved.items()):
        table.add_row(direction, format_bytes(num_bytes))
    bound = report.bound_bytes()
    table.add_row("up to the device, at least", format_bytes(bound))
    table.add_row("regret", format_bytes(report.bytes_up - bound))
    hits = f"{report.hits / report.reads:.1%} of {report.reads:,}" if report.reads else "no reads"
    table.add_row("reads that hit", hits)
    table.add_row("deviations from the plan", f"{report.deviations:,}")
    return table


def _peaks(report: StepReport) -> Table:
    table = _grid("peak", "tier", "bytes")
    for tier, num_bytes in report.bytes_peak.items():
        table.add_row(tier, format_bytes(num_bytes))
    table.add_row("gradient sums, beside the store", format_bytes(report.gradient_sum_bytes))
    return table
