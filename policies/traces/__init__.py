"""Traces: readers, writers, and the table of formats."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from tiercache.policies.errors import TraceError
from tiercache.policies.traces.base import Sizes, Trace, make_trace, with_next_uses
from tiercache.policies.traces.binary import (
    read_oracle_general,
    read_parquet,
    write_oracle_general,
    write_parquet,
)
from tiercache.policies.traces.files import stem
from tiercache.policies.traces.text import read_arc, read_csv, read_lirs, read_mooncake

FORMATS: dict[str, tuple[Callable[..., Trace], tuple[str, ...]]] = {
    "parquet": (read_parquet, (".parquet",)),
    "oracle_general": (read_oracle_general, (".oracleGeneral.bin", ".oracleGeneral")),
    "lirs": (read_lirs, (".trace",)),
    "arc": (read_arc, (".lis",)),
    "mooncake": (read_mooncake, (".jsonl",)),
    "csv": (read_csv, (".csv",)),
}
"""Name -> reader and the endings of file names that mean it; .gz, .xz or .zst may follow."""


def read_trace(
    path: str | Path,
    *,
    format: str | None = None,  # noqa: A002 - the option's name
    resize: Sizes | None = None,
    columns: Mapping[str, str] | None = None,
) -> Trace:
    """Reads a trace.

    Args:
        path: the file.
        format: one of `FORMATS`; found by the file's name when it is None.
        resize: see `make_trace`; each format has its own default.
        columns: names of a CSV file's columns.

    Raises:
        TraceError: unknown format, or a file that cannot be read, with the line or record.
    """
    path = Path(path)
    if format is None:
        name = stem(path)
        format = next((f for f, (_, ends) in FORMATS.items() if name.endswith(ends)), None)  # noqa: A001
    if format not in FORMATS:
        raise TraceError(
            f"{path}: unknown format", got=format, limit=", ".join(FORMATS), remedy="name the format"
        )
    options: dict[str, object] = {} if resize is None else {"resize": resize}
    if columns is not None:
        if format != "csv":
            raise TraceError(f"{path}: columns are named for CSV files only", got=format)
        options["columns"] = columns
    return FORMATS[format][0](path, **options)


__all__ = [
    "FORMATS",
    "Trace",
    "make_trace",
    "read_trace",
    "with_next_uses",
    "write_oracle_general",
    "write_parquet",
]
