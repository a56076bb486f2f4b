"""Figures of curves and traffic. One order and colour a policy everywhere, so that two figures can be compared."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tiercache.policies import POLICIES
from tiercache.policies.curves import Curve

COLOURS = (
    *("#9498a0", "#4269d0", "#97bbf5", "#3ca951", "#9c6b4e", "#b2df8a", "#e7969c", "#a463f2"),
    *("#ff725c", "#fdae6b", "#1b9e9e", "#efb118", "#e7298a", "#5a5a5a", "#bcbddc", "#00441b"),
)
OPTIMUM = "optimum"


def style_of(policy: str) -> dict[str, Any]:
    """Colour and dash by the policy's place in the table; the optimum is black."""
    if policy == OPTIMUM:
        return {"color": "black", "linestyle": "-", "linewidth": 2.0}
    names = list(POLICIES)
    place = names.index(policy) if policy in names else len(names)
    dashes = ("-", "--", ":")
    return {
        "color": COLOURS[place % len(COLOURS)],
        "linestyle": dashes[place // len(COLOURS) % 3],
        "linewidth": 1.5,
    }


def ordered(policies: Sequence[str]) -> list[str]:
    """The one legend order: the table's, users' files after it, the optimum last."""
    names = [*POLICIES]
    rank = {name: i for i, name in enumerate(names)}
    return sorted(policies, key=lambda p: (p == OPTIMUM, rank.get(p, len(names)), p))


def size_label(num_bytes: float) -> str:
    """Bytes in the largest unit that leaves a number of at least one."""
    for unit, power in (("TiB", 40), ("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if num_bytes >= 1 << power:
            return f"{num_bytes / (1 << power):.4g} {unit}"
    return f"{num_bytes:.4g} B"


def new_figure(width: float = 8.0, height: float = 4.5) -> Any:
    """A figure that belongs to no window system and no global state."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def draw_curves(curves: Sequence[Curve], title: str, *, by_bytes: bool = False) -> Any:
    """Miss ratio over capacity, one line a policy, error bands where sampled."""
    from matplotlib.ticker import FuncFormatter

    figure = new_figure()
    axes = figure.subplots()
    found = {curve.policy: curve for curve in curves}
    for policy in ordered(list(found)):
        curve = found[policy]
        ratio = curve.byte_miss_ratio if by_bytes else curve.miss_ratio
        style = style_of(policy)
        axes.plot(curve.capacities, ratio, label=policy, marker="o", markersize=3, **style)
        if curve.error.any():
            axes.fill_between(
                curve.capacities, ratio - curve.error, ratio + curve.error, color=style["color"], alpha=0.15
            )
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: size_label(value)))
    axes.xaxis.set_minor_formatter("")
    axes.set_xlabel("capacity")
    axes.set_ylabel("byte miss ratio" if by_bytes else "request miss ratio")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.set_title(title)
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False, fontsize="small")
    return figure


def save(figure: Any, path: str | Path) -> None:
    """Writes a PNG."""
    figure.savefig(path, dpi=150, format="png")


def embed(figure: Any) -> str:
    """An <img> with the PNG inside."""
    buffer = io.BytesIO()
    figure.savefig(buffer, dpi=110, format="png")
    return f'<img alt="" src="data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}">'
