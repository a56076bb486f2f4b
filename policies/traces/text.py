"""Text traces: LIRS integers, ARC lists, Mooncake JSON lines, CSV with named columns."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tiercache.policies.base import GET, LEASE, NEVER, RELEASE
from tiercache.policies.errors import TraceError
from tiercache.policies.traces.base import UNKNOWN, Sizes, Trace, make_trace
from tiercache.policies.traces.files import read_text

BLOCK_TOKENS = 512
COLUMNS = ("id", "size", "cost", "time", "next_use")
USUAL_NAMES = {
    "id": ("id", "key", "obj_id", "object_id", "object", "block"),
    "size": ("size", "bytes", "num_bytes", "obj_size", "object_size"),
    "cost": ("cost", "cost_s"),
    "time": ("time", "time_s", "timestamp"),
    "next_use": ("next_use", "next_access_vtime"),
}


def read_lirs(path: Path, resize: Sizes = "error") -> Trace:
    """One integer a line; lines with `*` are checkpoints and are ignored. All pages have one byte."""
    keys = []
    for number, line in enumerate(read_text(path).splitlines(), 1):
        word = line.strip()
        if not word or word == "*":
            continue
        try:
            keys.append(int(word))
        except ValueError as error:
            raise TraceError(f"{path}: line {number} is no integer", got=repr(word)) from error
    return make_trace(keys, source=str(path), resize=resize)


def read_arc(path: Path, resize: Sizes = "error") -> Trace:
    """Lines of first block, number of blocks, 0, request number: a request for each block. Blocks have one byte."""
    rows = []
    for number, line in enumerate(read_text(path).splitlines(), 1):
        words = line.split()
        if not words:
            continue
        try:
            rows.append((int(words[0]), int(words[1])))
        except (ValueError, IndexError) as error:
            raise TraceError(f"{path}: line {number} is no ARC request", got=repr(line)) from error
        if rows[-1][1] < 0:
            raise TraceError(f"{path}: line {number} has a negative length", got=rows[-1][1])
    table = np.array(rows, np.int64).reshape(-1, 2)
    lengths = table[:, 1]
    first = np.repeat(np.cumsum(lengths) - lengths, lengths)
    keys = np.repeat(table[:, 0], lengths) + np.arange(lengths.sum()) - first
    return make_trace(keys, source=str(path), resize=resize)


def read_mooncake(path: Path, resize: Sizes = "each", *, pinned: bool = False) -> Trace:
    """JSON lines with timestamp (ms), input_length and hash_ids: a request for each prefix block, in tokens.

    A block has 512 tokens, the last one of a prompt what is left. `tag` is 1 for a prompt's first record. With
    `pinned` a prompt's blocks are leased while it is served and requested from its end, as a server does it that
    frees a prompt's blocks in reverse: the root is then the youngest.
    """
    keys: list[int] = []
    sizes: list[int] = []
    times: list[float] = []
    firsts: list[int] = []
    ops: list[int] = []
    for number, line in enumerate(read_text(path).splitlines(), 1):
        try:
            record = json.loads(line)
            length, moment = int(record["input_length"]), float(record["timestamp"])
            blocks = [int(block) for block in record["hash_ids"]]
        except (ValueError, KeyError, TypeError) as error:
            raise TraceError(f"{path}: line {number} is no Mooncake request", got=error) from error
        tokens = [min(BLOCK_TOKENS, length - BLOCK_TOKENS * i) for i in range(len(blocks))]
        if tokens and tokens[-1] <= 0:
            raise TraceError(
                f"{path}: line {number} has more blocks than tokens",
                got=len(blocks),
                limit=f"{length} tokens",
            )
        steps = (LEASE, GET, RELEASE) if pinned else (GET,)
        keys += blocks[::-1] * 3 if pinned else blocks
        sizes += tokens[::-1] * 3 if pinned else tokens
        ops += [step for step in steps for _ in blocks]
        times += [moment / 1000] * len(blocks) * len(steps)
        firsts += ([1] + [0] * (len(blocks) * len(steps) - 1)) if blocks else []
    return make_trace(
        keys,
        sizes,
        source=str(path),
        ops=ops,
        times_s=times,
        tag_numbers=firsts,
        tags=("later", "first"),
        resize=resize,
    )


def read_csv(path: Path, resize: Sizes = "error", columns: Mapping[str, str] | None = None) -> Trace:
    """CSV with a header. `columns` maps id, size, cost, time, next_use to the file's names; usual names are found."""
    reader = csv.DictReader(io.StringIO(read_text(path)))
    header = list(reader.fieldnames or [])
    if not header:
        raise TraceError(f"{path}: the trace is empty", got="no header")
    names = _find_columns(path, header, columns or {})
    values: dict[str, list[Any]] = {what: [] for what in names}
    for row in reader:
        for what, name in names.items():
            word = row[name]
            try:
                values[what].append(
                    word if what == "id" else float(word) if what in ("cost", "time") else int(word)
                )
            except (TypeError, ValueError) as error:
                raise TraceError(
                    f"{path}: line {reader.line_num}, column {name!r} is no number", got=repr(word)
                ) from error
            if word is None:
                raise TraceError(f"{path}: line {reader.line_num} is truncated", got=dict(row))
    next_uses: Any = UNKNOWN
    if "next_use" in values:
        told = np.array(values["next_use"], np.int64)
        next_uses = np.where(told < 0, NEVER, told)
    times = np.array(values["time"]) - values["time"][0] if values.get("time") else None
    return make_trace(
        values["id"],
        values.get("size", 1),
        source=str(path),
        costs=values.get("cost", np.nan),
        next_uses=next_uses,
        times_s=times,
        resize=resize,
        first_record=2,
        unit="line",
    )


def _find_columns(path: Path, header: list[str], columns: Mapping[str, str]) -> dict[str, str]:
    for what, name in columns.items():
        if what not in COLUMNS:
            raise TraceError(f"{path}: unknown column {what!r}", limit=", ".join(COLUMNS))
        if name not in header:
            raise TraceError(f"{path}: unknown column {name!r}", limit=", ".join(header))
    found = dict(columns)
    for what, usual in USUAL_NAMES.items():
        if what not in found:
            found.update((what, name) for name in reversed(usual) if name in header)
    if "id" not in found:
        raise TraceError(
            f"{path}: no column for id", got=", ".join(header), remedy='give columns={"id": NAME}'
        )
    return found
