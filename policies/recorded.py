"""What a store asked its policies, read back from its trace and asked again.

A store's accesses alone do not decide its victims: worker threads write behind and bring pages up, leases hold pages,
loans take room. So a trace keeps every question to every tier's policy too, and its answers; asking a fresh policy
the same questions gives the identical victims.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tiercache.policies import create_policy
from tiercache.policies.errors import TraceError

META = b"tiercache.policies"
"""Key of a trace's metadata: a JSON array of each policy's tier, capacity_bytes, policy and options."""
QUESTIONS = (
    *("insert", "hit", "remove", "lease", "release", "evict"),
    *("next_use", "advance", "admits", "victims", "victim"),
)


@dataclass(frozen=True, slots=True)
class Recorded:
    """One tier's policy in a recorded trace.

    Attributes:
        tier: its name.
        policy: name of the policy.
        capacity_bytes: the tier's budget.
        options: the policy's parameters and admission.
        ops: what was told or asked, without the answers; words of `QUESTIONS`.
        ids: the policy's numbers of pages.
        numbers: bytes or times, by `ops`.
        costs: seconds, of insertions.
        victims: the answer to each "victims", in order.
        admitted: the answer to each "admits", in order.
    """

    tier: str
    policy: str
    capacity_bytes: int
    options: Mapping[str, Any]
    ops: npt.NDArray[np.str_]
    ids: npt.NDArray[np.int64]
    numbers: npt.NDArray[np.int64]
    costs: npt.NDArray[np.float64]
    victims: list[list[int]]
    admitted: list[bool]


def read_recorded(path: str | Path) -> list[Recorded]:
    """Every tier's policy in a trace that `open_store(trace=PATH)` recorded.

    Raises:
        TraceError: no such file, or it does not say what its policies were asked.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(path)
    except FileNotFoundError as error:
        raise TraceError(f"{path}: no such trace") from error
    except (pa.ArrowInvalid, OSError) as error:
        raise TraceError(f"{path}: no Parquet file, or a truncated one", got=error) from error
    told = (table.schema.metadata or {}).get(META)
    if told is None or "policy" not in table.column_names:
        raise TraceError(
            f"{path}: the trace does not say what policies were asked",
            remedy="record it with open_store(trace=PATH)",
        )
    of_tier = np.asarray(table["policy"].to_pylist(), np.str_)
    columns = {name: table[name].to_numpy() for name in ("id", "bytes", "cost")}
    ops = np.asarray(table["op"].to_pylist(), np.str_)
    return [
        _select(entry, ops[rows], {name: values[rows] for name, values in columns.items()})
        for entry in json.loads(told)
        for rows in [of_tier == entry["tier"]]
    ]


def _select(about: Mapping[str, Any], ops: npt.NDArray[np.str_], columns: Mapping[str, Any]) -> Recorded:
    unknown = sorted(set(ops.tolist()) - set(QUESTIONS))
    if unknown:
        raise TraceError(
            f"trace: tier {about['tier']} was asked what nobody knows",
            got=unknown,
            limit=", ".join(QUESTIONS),
        )
    answers = ops == "victim"
    ids = columns["id"].astype(np.int64)
    groups = np.cumsum(ops == "victims")[answers] - 1
    victims: list[list[int]] = [[] for _ in range(int((ops == "victims").sum()))]
    for group, page in zip(groups.tolist(), ids[answers].tolist(), strict=True):
        victims[group].append(page)
    return Recorded(
        about["tier"],
        about["policy"],
        about["capacity_bytes"],
        about["options"],
        ops[~answers],
        ids[~answers],
        columns["bytes"].astype(np.int64)[~answers],
        columns["cost"].astype(np.float64)[~answers],
        victims,
        [bool(yes) for yes in columns["cost"][ops == "admits"]],
    )


def replay(recorded: Recorded) -> tuple[list[list[int]], list[bool]]:
    """Asks a fresh policy all of it again; returns its victims and its admissions, in order."""
    policy = create_policy(recorded.policy, capacity_bytes=recorded.capacity_bytes, **recorded.options)
    victims: list[list[int]] = []
    admitted: list[bool] = []
    rows = zip(recorded.ops, recorded.ids.tolist(), recorded.numbers.tolist(), recorded.costs, strict=True)
    for op, page, number, cost in rows:
        if op == "insert":
            policy.insert(page, number, float(cost))
        elif op == "evict":
            policy.evict(page, number)
        elif op == "next_use":
            policy.set_next_use(page, None if number < 0 else number)
        elif op == "advance":
            policy.advance(number)
        elif op == "admits":
            admitted.append(policy.admits(page, number))
        elif op == "victims":
            victims.append(policy.victims(number))
        else:  # hit, remove, lease, release
            getattr(policy, op)(page)
    return victims, admitted
