"""`tiercache simulate`: a trace against policies and capacities."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tiercache.cli.simulate_output import plot_rows, print_replay, print_rows
from tiercache.cli.trace_options import Columns, Figures, Format, Resize, Speeds

if TYPE_CHECKING:
    from collections.abc import Callable

    from tiercache.policies.simulate import Result
    from tiercache.policies.spec import Tier
    from tiercache.policies.traces import Trace

app = typer.Typer()


def parse_columns(text: str | None) -> dict[str, str] | None:
    """Columns such as "id=obj,size=bytes" as a mapping."""
    from tiercache.errors import ConfigError

    if text is None:
        return None
    pairs = [item.partition("=") for item in text.split(",")]
    if any(not (name and sign and value) for name, sign, value in pairs):
        raise ConfigError("--columns", got=text, limit="WHAT=NAME,WHAT=NAME")
    return {name.strip(): value.strip() for name, _, value in pairs}


def split_names(text: str) -> list[str]:
    """Names of policies, with commas between them."""
    from tiercache.errors import ConfigError

    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise ConfigError("--policy: no name", got=repr(text))
    return names


def parse_below(text: str | None) -> list[tuple[str, int, str]]:
    """Tiers such as "host=64GiB:lru,disk=500GiB" as name, bytes and policy (lru by default)."""
    from tiercache.config import parse_size
    from tiercache.errors import ConfigError

    tiers = []
    for item in (text or "").split(",") if text else []:
        name, sign, rest = item.partition("=")
        size, _, policy = rest.partition(":")
        if not (name and sign and size):
            raise ConfigError("--below", got=text, limit="NAME=SIZE[:POLICY],...")
        tiers.append((name.strip(), parse_size(size, name), policy or "lru"))
    return tiers


def split_warmup(trace: Trace, share: float) -> int:
    """Requests of the warm-up."""
    from tiercache.errors import ConfigError

    if not 0 <= share < 1:
        raise ConfigError("--warmup", got=share, limit="0 to 1")
    return int(len(trace) * share)


@app.command()
def simulate(
    trace: Annotated[
        Path, typer.Argument(help="Parquet, oracleGeneral, LIRS, ARC, Mooncake JSONL or CSV; gz, xz, zst.")
    ],
    policy: Annotated[str, typer.Option(help="Names or files of hooks (.py), with commas.")] = "lru",
    capacity: Annotated[str, typer.Option(help="Sizes of the first tier, with commas.")] = "1GiB",
    below: Annotated[str | None, typer.Option(help="Tiers below it: host=64GiB:lru,disk=500GiB.")] = None,
    demotion: Annotated[str, typer.Option(help="exclusive or inclusive.")] = "exclusive",
    admission: Annotated[str, typer.Option(help="always, second_hit, size or ghost.")] = "always",
    admission_limit: Annotated[
        int | None, typer.Option(help="Misses, bytes or missed bytes, by admission.")
    ] = None,
    profile: Speeds = None,
    warmup: Annotated[float, typer.Option(help="Leading share that is not counted.")] = 0.0,
    sample: Annotated[float, typer.Option(help="Share of pages to play, against scaled-down tiers.")] = 1.0,
    format: Format = None,  # noqa: A002
    columns: Columns = None,
    resize: Resize = None,
    oversize: Annotated[str, typer.Option(help="Pages larger than the tier: error or refuse.")] = "error",
    json_file: Figures = None,
    plot: Annotated[Path | None, typer.Option(help="Write miss-ratio curves as PNG.")] = None,
    replay: Annotated[
        bool,
        typer.Option("--replay", help="Ask a recorded store's policies again and compare their victims."),
    ] = False,
) -> None:
    """Play a trace against policies: miss ratios, bytes moved, stall, the offline optimum and regret."""
    if replay:
        print_replay(trace, json_file)
        return
    from tiercache.config import parse_size
    from tiercache.policies import load_hooks
    from tiercache.policies.profiles import read_profile
    from tiercache.policies.traces import read_trace, with_next_uses

    speeds = read_profile(profile)
    loaded = read_trace(trace, format=format, resize=resize, columns=parse_columns(columns))  # type: ignore[arg-type]
    names = split_names(policy)
    if any(load_hooks(name)[0].oracle for name in names) and not loaded.has_next_uses:
        loaded = with_next_uses(loaded)  # a recorded trace knows its own future
    capacities = [parse_size(text.strip(), "capacity") for text in capacity.split(",")]
    skipped = split_warmup(loaded, warmup)

    def play(name: str, size: int, progress: Callable[[int], None]) -> Result:
        tiers = _tiers(name, size, below, admission, admission_limit, speeds)
        timed = profile is not None
        return _play(loaded, tiers, demotion, oversize, skipped, sample, speeds, timed, progress)

    def error_of(result: Result) -> float:
        return _sampling_error(loaded, result, sample, skipped)

    rows = _sweep(
        names, capacities, play, error_of, lambda size: _bounds(loaded, size, skipped), len(loaded) * sample
    )
    print_rows(rows, len(loaded), loaded.num_objects, profile is not None or below is not None)
    if json_file is not None:
        head = {"trace": str(trace), "requests": len(loaded), "pages": loaded.num_objects}
        json_file.write_text(json.dumps({**head, "results": rows}, indent=1))
    if plot is not None:
        plot_rows(rows, plot, trace.name)


def _sweep(
    names: list[str],
    capacities: list[int],
    play: Callable[[str, int, Callable[[int], None]], Result],
    error_of: Callable[[Result], float],
    bounds_at: Callable[[int], dict[str, Any]],
    num_requests: float,
) -> list[dict[str, Any]]:
    """Figures of every policy at every capacity, beside the offline optimum."""
    from rich.console import Console
    from rich.progress import Progress

    rows = []
    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("simulating", total=len(names) * len(capacities) * num_requests)
        for size in capacities:
            for name in names:
                played = play(name, size, lambda count: bar.advance(task, count))
                rows.append(_row(name, size, played) | {"miss_ratio_error": error_of(played)})
        bounds = {size: bounds_at(size) for size in capacities}
    for row in rows:
        bound = bounds[row["capacity_bytes"]]
        row |= {f"optimum_{key}": value for key, value in bound.items()}
        for prefix in ("", "byte_", "cost_"):
            row[f"{prefix}regret"] = row[f"{prefix}miss_ratio"] - bound[f"{prefix}miss_ratio"]
    return rows


def _tiers(
    name: str,
    size: int,
    below: str | None,
    admission: str,
    limit: int | None,
    speeds: Any,
) -> list[Tier]:
    from tiercache.policies.profiles import Speed
    from tiercache.policies.spec import Tier

    tiers = [
        Tier(
            name="device",
            capacity_bytes=size,
            policy=name,
            admission=admission,  # type: ignore[arg-type]  # Tier checks the name
            admission_limit=limit,
        )
    ]
    for lower, capacity, policy in parse_below(below):
        speed = speeds.get(lower, Speed(0.0, float("inf")))
        tiers.append(
            Tier(
                name=lower,
                capacity_bytes=capacity,
                policy=policy,
                latency_s=speed.latency_s,
                bytes_per_s=speed.bytes_per_s,
            )
        )
    return tiers


def _play(
    trace: Trace, tiers: list[Tier], demotion: str, oversize: str, warmup: int, sample: float, speeds: Any,
    timed: bool, progress: Any,
) -> Result:  # fmt: skip
    from dataclasses import replace

    from tiercache.policies.curves import sample_ids
    from tiercache.policies.simulate import simulate as run

    if sample < 1:
        mask = sample_ids(trace, sample)
        warmup = int(mask[trace.requests["id"][:warmup]].sum())
        trace = trace.select(mask)
        tiers = [replace(tier, capacity_bytes=max(1, round(tier.capacity_bytes * sample))) for tier in tiers]
    timing = {}
    if timed or len(tiers) > 1:
        source = speeds["source"]
        timing = {"source_latency_s": source.latency_s, "source_bytes_per_s": source.bytes_per_s}
    return run(trace, tiers, demotion=demotion, oversize=oversize, warmup=warmup, progress=progress, **timing)  # type: ignore[arg-type]


def _sampling_error(trace: Trace, result: Result, sample: float, warmup: int) -> float:
    """Half the width of the 95 % interval of the first tier's miss ratio; 0 when all pages were played."""
    from tiercache.policies.curves import sample_ids, sampling_error

    if sample >= 1:
        return 0.0
    mask = sample_ids(trace, sample)
    skipped = int(mask[trace.requests["id"][:warmup]].sum())
    return sampling_error(trace.select(mask), result.hits, sample, skipped)


def _row(name: str, size: int, result: Result) -> dict[str, Any]:
    top = result.counts[0]
    return {
        "policy": Path(name).stem if name.endswith(".py") else name,
        "capacity_bytes": size,
        "miss_ratio": top.miss_ratio,
        "byte_miss_ratio": top.byte_miss_ratio,
        "cost_miss_ratio": top.cost_miss_ratio,
        "misses": top.misses,
        "miss_bytes": top.miss_bytes,
        "refused": top.refused,
        "stall_s": result.stall_s,
        "moved_up_bytes": list(result.moved_up_bytes),
        "moved_down_bytes": list(result.moved_down_bytes),
        "tiers": [
            {"name": tier.name, "hits": c.hits, "misses": c.misses, "evicted_bytes": c.evicted_bytes}
            for tier, c in zip(result.tiers, result.counts, strict=False)
        ],
    }


def _bounds(trace: Trace, size: int, warmup: int) -> dict[str, Any]:
    from tiercache.policies.offline import optimum

    by_requests = optimum(trace, size, "requests", warmup=warmup)
    by_bytes = optimum(trace, size, "bytes", warmup=warmup)
    by_cost = optimum(trace, size, "cost", warmup=warmup)
    return {
        "miss_ratio": by_requests.miss_ratio,
        "byte_miss_ratio": by_bytes.miss_ratio,
        "cost_miss_ratio": by_cost.miss_ratio,
        "method": by_requests.method,
    }
