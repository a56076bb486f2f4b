"""What a step's report says of it: tokens, traffic against the books, bound and regret, one screen."""

from __future__ import annotations

import dataclasses
import io
import json

import pytest
import torch
from model_zoo import VOCAB
from plain_model import build_plain
from rich.console import Console

from tiercache import AccessPlan, PageKey, open_store
from tiercache.runtime import BranchReplay, Row, StepReport, prefix_attention
from tiercache.runtime.least_traffic import least_bytes_up

PAGE = 1000


def plan_of(*accesses: tuple[str, int]) -> AccessPlan:
    plan = AccessPlan()
    for operation, number in accesses:
        plan.add(operation, PageKey(bytes([number]) * 32, 0, "key"), PAGE)  # type: ignore[arg-type]
    return plan


def test_the_bound_is_what_no_eviction_can_avoid() -> None:
    """Three pages put, then read in turn twice: the device keeps what it has room for."""
    puts = [("put", n) for n in range(3)]
    reads = [("read", n) for n in (0, 1, 2, 0, 1, 2)]
    plan = plan_of(*puts, *reads)
    assert least_bytes_up(plan, 3 * PAGE) == 0
    one = least_bytes_up(plan, PAGE)
    assert PAGE <= one <= 6 * PAGE
    assert least_bytes_up(plan, 2 * PAGE) < one
    assert least_bytes_up(plan, 0) == 0
    assert least_bytes_up(plan_of(*puts), PAGE) == 0


def test_sums_count_for_nothing() -> None:
    plan = plan_of(("put", 0), ("read", 0))
    plan.add("accumulate", PageKey(b"s" * 32, 0, "grad_key", 1), 50 * PAGE)
    plan.add("take", PageKey(b"s" * 32, 0, "grad_key", 1), 50 * PAGE)
    assert least_bytes_up(plan, PAGE) == 0


def step(device: str, passes: str) -> tuple[StepReport, dict[str, int]]:
    """One step over four rows, by `backward` or by `logprobs` and its backward; its report and the store's books."""
    torch.manual_seed(0)
    model = build_plain(prefix_attention)
    prompt = torch.arange(96) % VOCAB
    tokens = torch.stack([torch.cat([prompt, torch.full((8,), n)]) for n in range(4)])
    scored = torch.arange(104) >= 96
    with open_store(device=device, host="8MiB") as store:
        replay = BranchReplay(model, store, max_node_tokens=16, min_shared_tokens=1, check_model=False)
        if passes == "backward":
            replay.backward([Row(row, scored) for row in tokens], lambda logps, row: logps.sum())
        else:
            replay.logprobs(tokens, None, scored.expand(4, -1)).sum().backward()
        stats = store.stats()
        assert replay.report is not None
        return replay.report, stats.bytes_moved | {"hits": stats.hits, "reads": stats.reads}


@pytest.mark.parametrize("passes", ["backward", "logprobs"])
def test_the_report_says_what_the_store_did(passes: str) -> None:
    report, books = step("24KiB", passes)
    assert (report.tokens_run, report.tokens_saved) == (96 + 4 * 8, 3 * 96)
    moved = {k: n for k, n in books.items() if "->" in k and n}
    assert set(report.bytes_moved) == set(moved)
    # copies that nobody waits for may end after the step
    assert all(0 < num_bytes <= moved[direction] for direction, num_bytes in report.bytes_moved.items())
    assert (report.hits, report.reads) == (books["hits"], books["reads"])
    assert report.bytes_moved["host->device"] == report.bytes_up > 0
    assert 0 < report.bound_bytes() <= report.bytes_up
    assert report.regret_bytes() == report.bytes_up - report.bound_bytes()
    assert set(report.bytes_peak) == {"device", "host"}
    assert report.bytes_peak["device"] <= 24 << 10


def test_a_step_with_room_has_nothing_to_regret() -> None:
    report, _ = step("8MiB", "backward")
    assert report.bytes_moved.get("host->device", 0) == 0
    assert report.bound_bytes() == report.regret_bytes() == 0


def test_a_report_prints_in_one_screen_and_goes_to_json() -> None:
    report, _ = step("24KiB", "backward")
    text = io.StringIO()
    Console(file=text, width=100).print(report)
    lines = text.getvalue().splitlines()
    assert len(lines) <= 50
    for word in (
        "tokens saved",
        "capture",
        "replay",
        "pop",
        "host->device",
        "regret",
        "stalled reads",
        "device",
    ):
        assert any(word in line for line in lines), word
    found = json.loads(json.dumps(report.as_dict()))
    public = {f.name for f in dataclasses.fields(report) if not f.name.startswith("_")}
    assert set(found) == public | {"tokens_run", "tokens_saved"}


def test_an_empty_report_prints() -> None:
    text = io.StringIO()
    Console(file=text, width=100).print(StepReport())
    assert "no reads" in text.getvalue()
