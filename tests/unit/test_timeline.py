"""The timeline of a step: compute, stalls, copies and disk on tracks of their own, in a form that Perfetto opens."""

from __future__ import annotations

import itertools
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from model_zoo import VOCAB
from plain_model import build_plain

from tiercache import open_store
from tiercache.errors import TraceError
from tiercache.runtime import BranchReplay, Row, prefix_attention
from tiercache.trace import SHORTEST_STALL_S, Timeline


def events_of(path: Path) -> tuple[list[dict[str, Any]], dict[int, str]]:
    """The complete events, and the tracks' names."""
    told = json.loads(path.read_text())["traceEvents"]
    names = {event["tid"]: event["args"]["name"] for event in told if event["ph"] == "M"}
    return [event for event in told if event["ph"] == "X"], names


def test_a_step_leaves_its_visits_copies_and_disk_on_their_own_tracks(tmp_path: Path) -> None:
    torch.manual_seed(0)
    prompt = torch.arange(96) % VOCAB
    rows = [Row(torch.cat([prompt, torch.full((8,), n)]), torch.arange(104) >= 96) for n in range(4)]
    path = tmp_path / "timeline.json"
    options = {"disk": tmp_path / "disk", "disk_capacity": "64MiB", "timeline": path}
    with open_store(device="24KiB", host="32KiB", **options) as store:
        replay = BranchReplay(
            build_plain(prefix_attention), store, max_node_tokens=16, min_shared_tokens=1, check_model=False
        )
        replay.backward(rows, lambda logps, row: logps.sum())
        moved = store.stats().bytes_moved
    events, names = events_of(path)
    by_track = defaultdict(list)
    for event in events:
        assert names[event["tid"]].split()[0] == event["cat"]
        by_track[event["cat"]].append(event)
    visits = [event["name"].split()[0] for event in by_track["compute"]]
    assert visits == ["capture"] * 6 + ["replay"] + ["pop"] * 6
    assert {event["name"] for event in by_track["copies"]} == {d for d in moved if "disk" not in d}
    assert {event["name"] for event in by_track["disk"]} == {d for d in moved if "disk" in d} != set()
    for direction, num_bytes in moved.items():
        copies = [e for e in by_track["copies"] + by_track["disk"] if e["name"] == direction]
        assert sum(event["args"]["bytes"] for event in copies) == num_bytes
    _check_tracks(events)


def _check_tracks(events: list[dict[str, Any]]) -> None:
    """Events of one track follow one another: a viewer would draw others as nested."""
    tracks = defaultdict(list)
    for event in events:
        tracks[event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    for spans in tracks.values():
        ordered = sorted(spans)
        assert all(a[1] <= b[0] + 1e-3 for a, b in itertools.pairwise(ordered))


def test_waits_are_stalls_and_very_short_ones_are_not(tmp_path: Path) -> None:
    timeline = Timeline(tmp_path / "t.json", 10.0)
    timeline.stalled("read", "page", 11.0, 11.5)
    timeline.stalled("read", "page", 12.0, 12.0 + SHORTEST_STALL_S / 2)
    timeline.save()
    events, names = events_of(tmp_path / "t.json")
    assert [(event["ts"], event["dur"]) for event in events] == [(1e6, 0.5e6)]
    assert list(names.values()) == ["stalls 1"]


def test_spans_end_with_an_exception_too(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    with open_store(device=4096, timeline=path) as store, pytest.raises(RuntimeError), store.span("work"):
        raise RuntimeError
    assert [event["name"] for event in events_of(path)[0]] == ["work"]


def test_a_timeline_that_cannot_be_written_says_so(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="cannot write"):
        Timeline(tmp_path / "no" / "t.json", 0.0).save()
