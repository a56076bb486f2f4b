"""`tiercache store`: look into the disk tier of a store, check it, clean it, rebuild its index."""

from __future__ import annotations

import json
import re
import time
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from tiercache.tiers.disk_meta import RecordEntry

app = typer.Typer(no_args_is_help=True, help="Look into a store's directory, check it, clean it.")

Directories = Annotated[
    list[Path], typer.Argument(help="Directories of the store, in the order of open_store.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


def _say(found: Any, *, as_json: bool) -> None:
    from rich.console import Console
    from rich.table import Table

    if as_json:
        typer.echo(json.dumps(found))
        return
    table = Table(show_header=False, box=None)
    for name, value in found.items():
        lines = "\n".join(map(str, value)) if isinstance(value, list) else str(value)
        table.add_row(name.replace("_", " "), lines)
    Console().print(table)


def _progress(*, quiet: bool) -> Any:
    """A bar on stderr that goes when its work is done; none where that is no terminal, or when quiet."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    # rich itself leaves an empty line where there is no terminal
    return Progress(*columns, console=console, transient=True, disable=quiet or not console.is_terminal)


def _segments(directories: list[Path]) -> list[Path]:
    return [
        path
        for number, home in enumerate(directories)
        for path in sorted((home / f"drive{number}").glob("*.seg"))
    ]


def _open_writer(directories: list[Path], **options: Any) -> Any:
    from tiercache.errors import ConfigError, TierIOError
    from tiercache.tiers.disk import DiskTier
    from tiercache.tiers.disk_files import check_drives, read_store_file

    store = read_store_file(directories[0]) if directories[0].is_dir() else None
    if store is None:
        raise ConfigError(f"disk tier: no store in {directories[0]}", remedy="name the directory of a store")
    check_drives(directories)
    capacity_bytes = sum(path.stat().st_size for path in _segments(directories)) + (16 << 20)
    tier = DiskTier(directories, capacity_bytes, durability=store.durability, **options)
    if tier.read_only:
        tier.close()
        raise TierIOError(f"disk tier: {directories[0]} is read-only: nothing was changed")
    return tier


@app.command()
def info(directories: Directories, as_json: AsJson = False) -> None:
    """Sizes, durability, records by namespace, and who writes."""
    from tiercache.tiers.disk_files import writer_pid
    from tiercache.tiers.disk_reader import DiskReader

    reader = DiskReader(directories)
    namespaces: dict[str, int] = {}
    stored_bytes = record_bytes = records = 0
    with _progress(quiet=as_json) as progress:
        for entry in progress.track(reader.entries(), reader.count(), description="records"):
            name = entry.meta.namespace.hex()
            namespaces[name] = namespaces.get(name, 0) + 1
            records, record_bytes = records + 1, record_bytes + entry.length
            stored_bytes += entry.meta.stored_bytes
    index = reader.index_path / "data.mdb"
    segments = _segments(directories)
    found = {
        "directories": [str(path) for path in directories],
        "uuid": reader.store.uuid,
        "durability": reader.store.durability,
        "opened_for_writing": reader.store.epoch,
        "writer_pid": writer_pid(reader.root),
        "segments": len(segments),
        "segment_bytes": sum(path.stat().st_size for path in segments),
        "index_bytes": index.stat().st_size if index.exists() else 0,
        "records": records,
        "record_bytes": record_bytes,
        "payload_bytes": stored_bytes,
        "damaged_entries": reader.damaged_entries,
        "namespaces": namespaces
        if as_json
        else [f"{name[:16]}: {count} records" for name, count in namespaces.items()],
    }
    reader.close()
    _say(found, as_json=as_json)


def _row(entry: RecordEntry) -> dict[str, Any]:
    key = entry.meta.key
    return {
        "key": entry.meta.digest.hex(),
        "node": None if key is None else key.node.hex(),
        "layer": None if key is None else key.layer,
        "kind": None if key is None else key.kind,
        "dtype": entry.meta.dtype,
        "shape": list(entry.meta.shape),
        "codec": entry.meta.codec,
        "raw_bytes": entry.meta.raw_bytes,
        "stored_bytes": entry.meta.stored_bytes,
        "age_s": round(max(0.0, time.time() - entry.created_ns / 1e9), 1),
        "hits": entry.hits,
    }


@app.command("ls")
def list_records(
    directories: Directories,
    limit: Annotated[int, typer.Option(min=0, help="Records to show; 0 for all.")] = 100,
    as_json: AsJson = False,
) -> None:
    """Key, node, layer, dtype, shape, codec, sizes, age and hits of each record."""
    from rich.console import Console
    from rich.table import Table

    from tiercache.tiers.disk_reader import DiskReader

    reader = DiskReader(directories)
    shown = islice(reader.entries(), limit or None)
    total = min(limit or reader.count(), reader.count())
    with _progress(quiet=as_json) as progress:
        rows = [_row(entry) for entry in progress.track(shown, total, description="records")]
    reader.close()
    if as_json:
        typer.echo(json.dumps(rows))
        return
    names = list(rows[0]) if rows else ["key"]
    table = Table(*(name.replace("_", " ") for name in names), box=None)
    for row in rows:
        table.add_row(
            *(str(value)[:12] if name in ("key", "node") else str(value) for name, value in row.items())
        )
    Console(width=max(Console().width, 150)).print(table)


@app.command()
def verify(directories: Directories, as_json: AsJson = False) -> None:
    """Read every record and prove its checksums. Exit status 1 when one is bad. Works beside a writer."""
    from tiercache.errors import PageCorruptError, PageMissingError, TierIOError
    from tiercache.tiers.disk_reader import DiskReader

    reader = DiskReader(directories)
    entries = list(reader.entries())
    bad: list[str] = []
    num_bytes = gone = 0
    with _progress(quiet=as_json) as progress:
        for entry in progress.track(entries, description="records"):
            try:
                with reader.lease(entry.meta.digest) as lease:
                    num_bytes += lease.read().size
            except PageMissingError:
                if reader.value(entry.meta.digest) is None:
                    gone += 1
                else:
                    bad.append(
                        f"{entry.meta.key or entry.meta.digest.hex()}: its segment is missing or damaged"
                    )
            except (PageCorruptError, TierIOError) as error:
                bad.append(f"{entry.meta.key or entry.meta.digest.hex()}: {error}")
    if reader.damaged_entries:
        bad.append(f"{reader.damaged_entries} entries of the index are damaged: rebuild it")
    reader.close()
    _say(
        {"records": len(entries), "payload_bytes": num_bytes, "removed_meanwhile": gone, "bad": bad},
        as_json=as_json,
    )
    if bad:
        raise typer.Exit(1)


def _hex(text: str) -> str:
    if not re.fullmatch("[0-9a-f]{1,64}", text.lower()):
        raise typer.BadParameter(f"{text!r} is not the hexadecimal beginning of a namespace")
    return text.lower()


@app.command()
def gc(
    directories: Directories,
    older_than_days: Annotated[
        float | None, typer.Option(min=0, help="Remove records that are older.")
    ] = None,
    namespace: Annotated[
        str | None, typer.Option(parser=_hex, help="Remove records whose namespace begins so (hex).")
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="Remove every record.")] = False,
    as_json: AsJson = False,
) -> None:
    """Remove records by age or namespace, segment files without records, and files that were refused."""
    from tiercache.tiers.disk_meta import entry_of

    tier = _open_writer(directories)
    before = tier.stats()["file_bytes"]
    youngest_ns = None if older_than_days is None else (time.time() - older_than_days * 86400) * 1e9
    removed = removed_bytes = 0
    with _progress(quiet=as_json) as progress:
        for _, value in progress.track(tier.core.records(), description="records"):
            entry = entry_of(value)
            old = youngest_ns is not None and entry.created_ns < youngest_ns
            named = namespace is not None and entry.meta.namespace.hex().startswith(namespace)
            if everything or old or named:
                tier.remove(entry.meta.digest)
                removed, removed_bytes = removed + 1, removed_bytes + entry.length
    tier.flush()
    freed = tier.trim()
    found = {
        "removed_records": removed,
        "removed_bytes": removed_bytes,
        "refused_files": len(tier.refused_files),
        "freed_file_bytes": freed,
        "file_bytes_before": before,
        "file_bytes": tier.stats()["file_bytes"],
    }
    tier.close()
    _say(found, as_json=as_json)


@app.command()
def rebuild(directories: Directories, as_json: AsJson = False) -> None:
    """Make the index anew from the segments alone."""
    with _progress(quiet=as_json) as progress:
        task = progress.add_task("segments", total=None)
        tier = _open_writer(
            directories, rebuild=lambda done, total: progress.update(task, completed=done, total=total)
        )
    found, adopted, bad = tier.rebuilt
    tier.flush()
    tier.close()
    _say({"found": found, "adopted": adopted, "bad": bad}, as_json=as_json)
