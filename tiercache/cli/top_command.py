"""`tiercache top`: a running store, live in the terminal."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.console import Group

app = typer.Typer()


@app.command()
def top(
    url: Annotated[str, typer.Argument(help="Of the run's MetricsServer, as in http://127.0.0.1:9400.")],
    interval: Annotated[float, typer.Option(help="Seconds between looks.")] = 1.0,
    count: Annotated[
        int | None, typer.Option(help="Looks; until interrupted or the store ends, by default.")
    ] = None,
) -> None:
    """Show occupancy, traffic, hit ratio and stalls of a store that serves its counters (`MetricsServer`)."""
    from rich.live import Live

    from tiercache.errors import ConfigError

    if not interval > 0:
        raise ConfigError("top: interval", got=interval, limit="> 0")
    before, at_s = _look(url), time.monotonic()
    with Live(_screen(before, before, 1.0), refresh_per_second=4) as live:
        looked = 1
        while count is None or looked < count:
            time.sleep(interval)
            try:
                now = _look(url)
            except ConfigError:
                break  # the run has ended; what was seen last stays on the screen
            now_s = time.monotonic()
            live.update(_screen(now, before, now_s - at_s))
            before, at_s, looked = now, now_s, looked + 1


def _look(url: str) -> dict[str, Any]:
    """The store's counters. Raises ConfigError when nobody answers, or somebody else."""
    from tiercache.errors import ConfigError

    remedy = "start the run with tiercache.metrics.MetricsServer(store, port=9400)"
    if not url.startswith(("http://", "https://")):
        raise ConfigError("top: no URL", got=url, limit="http://HOST:PORT")
    try:
        with urllib.request.urlopen(f"{url.rstrip('/')}/stats", timeout=5) as answer:  # noqa: S310 - http only, above
            found = json.loads(answer.read())
    except (OSError, ValueError, urllib.error.URLError) as error:
        raise ConfigError(f"top: no store answers at {url}", got=error, remedy=remedy) from error
    if not isinstance(found, dict) or "bytes_capacity" not in found:
        raise ConfigError(f"top: what answers at {url} is no store", remedy=remedy)
    return found


def _screen(now: dict[str, Any], before: dict[str, Any], seconds: float) -> Group:
    from rich.console import Group
    from rich.progress_bar import ProgressBar
    from rich.table import Table

    from tiercache.units import format_bytes, format_seconds

    tiers = Table(title="occupancy", title_justify="left")
    for heading in ("tier", "", "used", "peak", "budget"):
        tiers.add_column(heading, justify="right" if heading in ("used", "peak", "budget") else "left")
    for tier, capacity in now["bytes_capacity"].items():
        used = now["bytes_used"].get(tier, 0)
        peak = now["bytes_peak"].get(tier, 0)
        bar = ProgressBar(total=max(1, capacity), completed=used, width=30)
        tiers.add_row(tier, bar, *(format_bytes(n) for n in (used, peak, capacity)))
    traffic = Table(title="traffic", title_justify="left")
    for heading in ("direction", "now", "in all"):
        traffic.add_column(heading, justify="left" if heading == "direction" else "right")
    for direction, moved in now["bytes_moved"].items():
        rate = (moved - before["bytes_moved"].get(direction, 0)) / seconds
        traffic.add_row(direction, f"{format_bytes(rate)}/s", format_bytes(moved))
    reads, hits = (now[what] - before[what] for what in ("reads", "hits"))
    share = f"{now['hits'] / now['reads']:.1%}" if now["reads"] else "no reads"
    recent = f"{hits / reads:.1%}" if reads else "-"
    stalled = (now["stall_s"] - before["stall_s"] + now["put_stall_s"] - before["put_stall_s"]) / seconds
    counters = Table(title="counters", title_justify="left", show_header=False)
    counters.add_row("pages", f"{now['pages']:,}")
    counters.add_row("hit ratio now, in all", f"{recent}, {share}")
    counters.add_row("stalled now", f"{stalled:.0%} of the time")
    counters.add_row(
        "stalled in all, reads and puts",
        f"{format_seconds(now['stall_s'])}, {format_seconds(now['put_stall_s'])}",
    )
    counters.add_row("deviations, evictions", f"{now['deviations']:,}, {now['evictions']:,}")
    return Group(tiers, traffic, counters)
