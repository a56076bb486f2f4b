"""Binary traces: oracleGeneral, and our own Parquet as the store records it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from tiercache.policies import base
from tiercache.policies.base import NEVER
from tiercache.policies.errors import TraceError
from tiercache.policies.traces.base import UNKNOWN, Sizes, Trace, make_trace, with_next_uses
from tiercache.policies.traces.files import read_bytes

ORACLE = np.dtype([("time", "<u4"), ("id", "<u8"), ("size", "<u4"), ("next", "<i8")])
"""24-byte records: seconds, id, bytes, 1-based index of the next use (-1: never)."""

OPS = {
    "read": base.GET,
    "put": base.PUT,
    "accumulate": base.PUT,
    "take": base.TAKE,
    "discard": base.REMOVE,
    "lease": base.LEASE,
    "release": base.RELEASE,
}
"""Names of operations in a Parquet trace."""


def read_oracle_general(path: Path, resize: Sizes = "error") -> Trace:
    """LibCacheSim's oracleGeneral format. Next uses are the file's."""
    data = read_bytes(path)
    count, rest = divmod(len(data), ORACLE.itemsize)
    if rest:
        raise TraceError(
            f"{path}: truncated in record {count}", got=f"{rest} bytes", limit=f"{ORACLE.itemsize}"
        )
    records = np.frombuffer(data, ORACLE)
    told = records["next"]
    next_uses = np.where((told < 0) | (told == np.iinfo(np.int64).max), NEVER, told - 1)
    wrong = np.flatnonzero((next_uses < NEVER) & (next_uses <= np.arange(count)))
    if len(wrong):
        raise TraceError(f"{path}: record {wrong[0]} is used next before itself", got=int(told[wrong[0]]))
    return make_trace(
        records["id"],
        records["size"].astype(np.int64),
        source=str(path),
        next_uses=next_uses,
        times_s=records["time"].astype(np.float64) - (records["time"][0] if count else 0),
        resize=resize,
    )


def write_oracle_general(trace: Trace, path: str | Path) -> None:
    """Writes counted requests in oracleGeneral; ids are the dense ones plus 1, next uses are found if unknown."""
    if (trace.requests["size"] >= 1 << 32).any():
        raise TraceError("oracleGeneral keeps sizes in 32 bits", got=int(trace.requests["size"].max()))
    lookups = trace.requests[np.isin(trace.requests["op"], (base.GET, base.TAKE))]
    known = with_next_uses(Trace(lookups, trace.keys)).requests
    records = np.zeros(len(known), ORACLE)
    records["id"] = known["id"].astype(np.uint64) + 1
    records["size"] = known["size"]
    records["next"] = np.where(known["next_use"] >= NEVER, -1, known["next_use"] + 1)
    if trace.times_s is not None:
        records["time"] = trace.times_s[np.isin(trace.requests["op"], (base.GET, base.TAKE))].astype(
            np.uint32
        )
    records.tofile(Path(path))


def write_parquet(trace: Trace, path: str | Path) -> None:
    """Writes all of the trace in the store's columns, and costs, next uses and kinds beside them."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    requests = trace.requests
    names = {number: name for name, number in reversed(OPS.items())}
    if unnamed := set(requests["op"].tolist()) - set(names):
        raise TraceError("write_parquet: an operation has no name in a trace", got=sorted(unnamed))
    ops = pa.array([names.get(number, "") for number in range(max(names) + 1)])
    kinds = pa.array(list(trace.tags) or [""])
    table = pa.table(
        {
            "time": np.zeros(len(trace)) if trace.times_s is None else trace.times_s,
            "key": pa.DictionaryArray.from_arrays(pa.array(requests["id"]), pa.array(trace.keys)),
            "op": pa.DictionaryArray.from_arrays(pa.array(requests["op"].astype(np.int32)), ops),
            "bytes": requests["size"],
            "cost": requests["cost"],
            "next_use": requests["next_use"],
            "kind": pa.DictionaryArray.from_arrays(pa.array(requests["tag"].astype(np.int32)), kinds),
        }
    )
    pq.write_table(table, Path(path), compression="zstd")


def read_parquet(path: Path, resize: Sizes = "each") -> Trace:
    """Our own Parquet, as `open_store(trace=PATH)` records it or `write_parquet` writes it.

    What the store's policies were asked (`policies.recorded` reads it) is left out. A lookup of a page that was not
    there, recorded with 0 bytes, has the page's largest size.
    """
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(path)
    except FileNotFoundError as error:
        raise TraceError(f"{path}: no such trace") from error
    except (pa.ArrowInvalid, OSError) as error:
        raise TraceError(f"{path}: no Parquet file, or a truncated one", got=error) from error
    for name in ("key", "op", "bytes"):
        if name not in table.column_names:
            raise TraceError(f"{path}: unknown columns: no {name!r}", got=", ".join(table.column_names))
    if "policy" in table.column_names:
        table = table.filter(pc.equal(table["policy"].cast(pa.string()), ""))
    names = table["op"].to_pylist()
    unknown = next((i for i, name in enumerate(names) if name not in OPS), None)
    if unknown is not None:
        raise TraceError(
            f"{path}: record {unknown} has an unknown op", got=names[unknown], limit=", ".join(OPS)
        )
    kinds = (
        table["kind"].combine_chunks().cast(pa.string()).dictionary_encode()
        if "kind" in table.column_names
        else None
    )

    for name in ("key", "bytes"):
        if table[name].null_count:
            row = table[name].is_null().to_pylist().index(True)
            raise TraceError(f"{path}: record {row} has no {name}")

    def column(name: str, absent: Any) -> Any:
        return table[name].to_numpy() if name in table.column_names else absent

    times = column("time", None)
    keys = table["key"].combine_chunks()
    trace = make_trace(
        keys.cast(keys.type.value_type) if pa.types.is_dictionary(keys.type) else keys,
        column("bytes", 1),
        source=str(path),
        costs=column("cost", np.nan),
        next_uses=column("next_use", UNKNOWN),
        ops=np.array([OPS[name] for name in names], np.int8),
        times_s=None if times is None or len(times) == 0 else times - times[0],
        tag_numbers=0 if kinds is None else kinds.indices.to_numpy(),
        tags=() if kinds is None else tuple(kinds.dictionary.to_pylist()),
        resize=resize,
    )
    largest = np.zeros(trace.num_objects, np.int64)
    np.maximum.at(largest, trace.requests["id"], trace.requests["size"])
    empty = trace.requests["size"] == 0
    trace.requests["size"][empty] = largest[trace.requests["id"][empty]]
    return trace
