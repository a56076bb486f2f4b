"""One HTML page about a trace, with everything inside: curves, traffic, reuse distances, early evictions."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tiercache.policies.base import GET, PUT, TAKE
from tiercache.policies.curves import INFINITE, Curve, run_curve, stack_distances
from tiercache.policies.offline import optimum
from tiercache.policies.plots import OPTIMUM, draw_curves, embed, new_figure, ordered, size_label, style_of
from tiercache.policies.simulate import run_tier
from tiercache.policies.spec import Tier
from tiercache.policies.traces.base import Trace, with_next_uses

BINS = 120
STYLE = """body{font:15px/1.5 system-ui,sans-serif;max-width:62rem;margin:2rem auto;padding:0 1rem;color:#222}
table{border-collapse:collapse}td,th{padding:.2rem .8rem;border-bottom:1px solid #ddd;text-align:right}
td:first-child,th:first-child{text-align:left}img{max-width:100%}h2{margin-top:2.5rem}"""


@dataclass(frozen=True, slots=True)
class EarlyEviction:
    """A page that was loaded again soon after it had been evicted.

    Attributes:
        key: of the page.
        times: evictions that were followed by a lookup within the horizon.
        num_bytes: bytes loaded again for them.
        shortest: requests between such an eviction and the lookup, at least.
    """

    key: str
    times: int
    num_bytes: int
    shortest: int


def find_early_evictions(
    trace: Trace, tier: Tier, top: int = 20, horizon: int | None = None
) -> list[EarlyEviction]:
    """Pages that the tier gave up and wanted again within `horizon` requests (a tenth of the trace)."""
    played = run_tier(_ready(trace, tier.policy), tier, emit="exclusive", oversize="refuse")
    assert played.events is not None
    assert played.event_times is not None
    horizon = max(1, len(trace) // 10) if horizon is None else horizon
    ids, ops, times = played.events["id"], played.events["op"], played.event_times
    order = np.lexsort((np.arange(len(ids)), ids))
    before, after = order[:-1], order[1:]
    gap = times[after] - times[before]
    early = (ids[before] == ids[after]) & (ops[before] == PUT) & (ops[after] != PUT) & (gap <= horizon)
    pages = ids[before][early]
    sizes = played.events["size"][after][early]
    count = np.bincount(pages, minlength=trace.num_objects)
    loaded = np.bincount(pages, sizes, trace.num_objects)
    shortest = np.full(trace.num_objects, len(trace))
    np.minimum.at(shortest, pages, gap[early])
    worst = np.argsort(-loaded, kind="stable")[:top]
    return [
        EarlyEviction(str(trace.keys[k]), int(count[k]), int(loaded[k]), int(shortest[k]))
        for k in worst
        if count[k]
    ]


def _ready(trace: Trace, policy: str) -> Trace:
    from tiercache.policies import load_hooks

    return with_next_uses(trace) if load_hooks(policy)[0].oracle and not trace.has_next_uses else trace


def make_report(
    trace: Trace,
    policies: Sequence[str],
    capacities: Sequence[int],
    below: Sequence[Tier] = (),
    rate: float = 1.0,
) -> str:
    """The page.

    Args:
        trace: recorded accesses.
        policies: names, compared on curves; the first one is looked at closely.
        capacities: of curves, in bytes; the middle one is looked at closely.
        below: tiers below it, for traffic.
        rate: share of pages that curves are drawn from.
    """
    known = _ready(trace, "belady")
    capacity = sorted(capacities)[len(capacities) // 2]
    curves = [run_curve(_ready(trace, name), name, capacities, rate=rate) for name in policies]
    bounds = [optimum(known, size) for size in capacities]
    ratios = np.array([bound.miss_ratio for bound in bounds])
    curves.append(Curve(OPTIMUM, np.asarray(capacities), ratios, ratios, np.zeros(len(capacities))))
    tier = Tier(name="device", capacity_bytes=capacity, policy=policies[0])
    parts = [
        f"<h1>{html.escape(trace.source)}</h1>",
        _facts(trace),
        "<h2>Miss ratio over capacity</h2>",
        f"<p>{_bound_words(bounds[0].method, rate)}</p>",
        embed(draw_curves(curves, "Request miss ratio")),
        _curve_table(curves, capacities),
        f"<h2>Traffic over time</h2><p>{html.escape(policies[0])} at {size_label(capacity)}.</p>",
        embed(_draw_traffic(trace, [tier, *below])),
        "<h2>Reuse distances</h2><p>Bytes used between two uses of a page; a capacity left of a hump misses it.</p>",
        embed(_draw_distances(trace)),
        "<h2>Evicted too early</h2>",
        _early_table(find_early_evictions(trace, tier), policies[0], capacity),
    ]
    title = html.escape(trace.source.rsplit("/", 1)[-1])
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f"<style>{STYLE}</style></head><body>{''.join(parts)}</body></html>"
    )


def _bound_words(method: str, rate: float) -> str:
    what = "the exact optimum" if method == "exact" else "a bound (PFOO-L) that no policy can beat"
    sampled = (
        "" if rate >= 1 else f" Curves are drawn from {rate:.3g} of the pages; bands are 95 % intervals."
    )
    return f"The black line is {what}.{sampled}"


def _table(heads: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    head = "".join(f"<th>{html.escape(text)}</th>" for text in heads)
    body = "".join(
        "<tr>" + "".join(f"<td>{html.escape(str(cell))}</td>" for cell in row) + "</tr>" for row in rows
    )
    return f"<table><tr>{head}</tr>{body}</table>"


def _facts(trace: Trace) -> str:
    lookups = int(np.isin(trace.requests["op"], (GET, TAKE)).sum())
    span = "unknown" if trace.times_s is None else f"{trace.times_s[-1] - trace.times_s[0]:.4g} s"
    rows = [
        ("records", len(trace)),
        ("lookups", lookups),
        ("pages", trace.num_objects),
        ("bytes looked up", size_label(trace.num_bytes)),
        ("bytes of distinct pages", size_label(trace.footprint_bytes)),
        ("time span", span),
    ]
    return _table(("", ""), rows)


def _curve_table(curves: Sequence[Curve], capacities: Sequence[int]) -> str:
    found = {curve.policy: curve for curve in curves}
    rows = [[name, *(f"{ratio:.4f}" for ratio in found[name].miss_ratio)] for name in ordered(list(found))]
    return _table(["policy", *(size_label(size) for size in capacities)], rows)


def _draw_traffic(trace: Trace, tiers: Sequence[Tier]) -> Any:
    """Bytes a bin that each tier reads up and writes down."""
    figure = new_figure(8, 1 + 2.2 * len(tiers))
    panels = figure.subplots(len(tiers), 1, sharex=True, squeeze=False)[:, 0]
    current, origin = trace, np.arange(len(trace))
    edges = np.linspace(0, len(trace), BINS + 1)
    for axes, tier, below in zip(panels, tiers, [*[t.name for t in tiers[1:]], "source"], strict=True):
        played = run_tier(_ready(current, tier.policy), tier, emit="exclusive", oversize="refuse")
        assert played.events is not None
        assert played.event_times is not None
        if len(played.events) == 0:
            break
        origin = origin[played.event_times]
        down = played.events["op"] == PUT
        for chosen, label, style in ((~down, f"read from {below}", "-"), (down, f"written to {below}", "--")):
            total, _ = np.histogram(origin[chosen], edges, weights=played.events["size"][chosen])
            axes.stairs(
                total,
                edges,
                label=label,
                color="#4269d0" if style == "-" else "#ff725c",
                ls=style,
                fill=False,
            )
        axes.set_ylabel(f"{tier.name}\nbytes per bin")
        axes.yaxis.set_major_formatter(lambda value, _: size_label(value))
        axes.legend(loc="upper right", frameon=False, fontsize="small")
        axes.grid(alpha=0.3)
        current = Trace(played.events, trace.keys, trace.source)
    panels[-1].set_xlabel("request")
    return figure


def _draw_distances(trace: Trace) -> Any:
    lookups = trace.requests["op"] == GET

    if not lookups.any():
        distances = np.empty(0, np.int64)
    else:
        distances = stack_distances(Trace(trace.requests[lookups], trace.keys, trace.source))
    again = distances[distances < INFINITE]
    figure = new_figure(8, 3.2)
    axes = figure.subplots()
    if len(again):
        low, high = max(int(again.min()), 1), max(int(again.max()), 2)
        edges = np.geomspace(low, high * 1.01, 61)
        total, _ = np.histogram(again, edges)
        axes.stairs(total, edges, fill=True, color=style_of("lru")["color"], alpha=0.7)
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(lambda value, _: size_label(value))
    first = (distances >= INFINITE).sum() / max(len(distances), 1)
    axes.set_xlabel(f"reuse distance ({first:.1%} of lookups are first uses)")
    axes.set_ylabel("lookups")
    axes.grid(alpha=0.3)
    return figure


def _early_table(found: Sequence[EarlyEviction], policy: str, capacity: int) -> str:
    if not found:
        return f"<p>{html.escape(policy)} at {size_label(capacity)} gave up nothing that was wanted soon after.</p>"
    rows = [(e.key, e.times, size_label(e.num_bytes), e.shortest) for e in found]
    return _table(("page", "early evictions", "loaded again", "soonest, in requests"), rows)
