"""The figure: memory over time of both sides, and where the pages were meanwhile."""

from __future__ import annotations

from pathlib import Path

from tiercache.cli.demo.race import SideResult
from tiercache.cli.demo.settings import DemoSettings

MIB = 1 << 20
COLOURS = {
    "dense": "#b0413e",
    "tiercache": "#1f6f8b",
    "device": "#1f6f8b",
    "host": "#6fb1a0",
    "disk": "#d9c77e",
}


def draw(path: Path, settings: DemoSettings, dense: SideResult, ours: SideResult) -> None:
    """Writes a PNG to `path`."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5.6), layout="constrained", dpi=150)
    FigureCanvasAgg(figure)
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=[3, 2])
    for name, side in (("dense", dense), ("tiercache", ours)):
        seconds = [sample[0] for sample in side.samples]
        held = [max(sample[1], 0) / MIB for sample in side.samples]
        label = "dense training" if name == "dense" else "tiercache"
        above.plot(seconds, held, color=COLOURS[name], linewidth=1.4, label=f"{label}: {side.step_s:.1f} s")
        above.fill_between(seconds, held, color=COLOURS[name], alpha=0.12)
    above.set_ylabel("memory of the step, MiB")
    above.set_title(
        f"{settings.branches} branches of {settings.tail_tokens} tokens over one prompt of "
        f"{settings.prompt_tokens} tokens",
        loc="left",
        fontsize=11,
    )
    tiers = ("device", "host", "disk")
    seconds = [sample[0] for sample in ours.samples]
    stacked = [[sample[2].get(tier, 0) / MIB for sample in ours.samples] for tier in tiers]
    below.stackplot(
        seconds, stacked, labels=[f"{tier} tier" for tier in tiers], colors=[COLOURS[t] for t in tiers]
    )
    below.set_ylabel("pages of tiercache, MiB")
    below.set_xlabel("seconds since the step began")
    for axes in (above, below):
        axes.set_ylim(0, max(axes.dataLim.y1, 1.0) * 1.3)  # room for the legend above the curves
        axes.legend(loc="upper right", ncols=3, frameon=False)
        axes.margins(x=0.01)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", alpha=0.25)
    figure.savefig(path, format="png")
