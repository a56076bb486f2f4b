"""Plans of models that keep keys and values, or states too: bytes and least budgets are those of the step."""

from __future__ import annotations

from typing import Any

import model_zoo
import pytest
import torch

from tiercache import open_store
from tiercache.errors import PlanError, TierFullError
from tiercache.measure.machine import this_machine
from tiercache.runtime import BranchReplay, Row
from tiercache.runtime.access import plan_accesses
from tiercache.runtime.needs import least_bytes
from tiercache.runtime.planning.hardware import Hardware
from tiercache.runtime.planning.planner import Job, plan_job
from tiercache.runtime.rows import check_rows
from tiercache.usual import usual_profile

NODE, NODES, TAIL, BRANCHES = 64, 3, 8, 2
LIMITS = {"max_node_tokens": NODE, "max_visit_tokens": BRANCHES * TAIL}
FAMILIES = ("llama", "gemma3", "lfm2", "qwen3_5", "deepseek_v3", "mixtral", "mamba2")
ALL = (*model_zoo.FAMILIES, *model_zoo.LATENTS, *model_zoo.SELECTIONS, *model_zoo.STATES)
HERE = Hardware(
    name="here",
    source="made up",
    profile=usual_profile(accelerator=False),
    num_devices=1,
    device_bytes=this_machine().memory_bytes,
    host_bytes=this_machine().memory_bytes,
    on_host=True,
)


def rows() -> list[Row]:
    prompt = torch.arange(NODES * NODE) % 7
    tails = [torch.full((TAIL,), 20 + n) for n in range(BRANCHES)]
    return [Row(torch.cat([prompt, t]), torch.arange(len(prompt) + TAIL) >= len(prompt)) for t in tails]


def planned(model: Any, device: int, kept: str = "layer_inputs", **budgets: int) -> Any:
    job = Job(
        prompt_tokens=NODES * NODE, tail_tokens=TAIL, branches=BRANCHES, dtype=torch.float32, optimizer="none"
    )
    return plan_job(model.config, job, HERE, device=device, names=(kept,), **LIMITS, **budgets)


def accesses_of(replay: BranchReplay) -> Any:
    engine = replay.engine
    step = engine.make_step(check_rows(rows(), model_zoo.VOCAB))
    with engine.running(step.tree.longest_row, step.sums, None):
        shape = engine.shape(step.sums)
    return plan_accesses(engine.runner, step, engine.visits(step, "step"), shape)


@pytest.mark.parametrize(
    "family",
    [*FAMILIES, *(pytest.param(name, marks=pytest.mark.long) for name in ALL if name not in FAMILIES)],
)
def test_bytes_and_least_budgets_are_those_of_the_step(family: str) -> None:
    model = model_zoo.build(family, dtype=torch.float32)
    with open_store(device="64MiB") as store:
        replay = BranchReplay(model, store, check_model=False, **LIMITS)
        accesses = accesses_of(replay)
        replay.backward(rows(), lambda logps, row: logps.sum())
        walked = store.stats().bytes_peak["device"]
    in_all, on_device = least_bytes(accesses)
    found = planned(model, 64 << 20).choices[0].estimate
    assert found.page_bytes == in_all == walked
    assert found.tier_bytes == {"device": walked, "host": 0, "disk": 0}
    tight = planned(model, on_device, host=in_all // 2, disk=1 << 30).choices[0].estimate
    assert sum(tight.tier_bytes.values()) == in_all
    with pytest.raises(PlanError, match=rf"at least {on_device}\b"):
        planned(model, on_device - 1)
    with open_store(device=on_device - 1, host="64MiB") as store:
        replay = BranchReplay(model, store, check_model=False, **LIMITS)
        with pytest.raises(TierFullError, match=rf"at least {on_device}\b"):
            replay.backward(rows(), lambda logps, row: logps.sum())


@pytest.mark.parametrize("kept", ["recompute", "attention", "all"])
@pytest.mark.parametrize("family", ["gemma3", "deepseek_v3"])
def test_the_least_device_budget_is_that_of_each_choice(family: str, kept: str) -> None:
    model = model_zoo.build(family, dtype=torch.float32)
    with open_store(device="64MiB") as store:
        replay = BranchReplay(model, store, check_model=False, prefix_activations=kept, **LIMITS)
        _, on_device = least_bytes(accesses_of(replay))
    planned(model, on_device, kept)
    with pytest.raises(PlanError, match=rf"at least {on_device}\b"):
        planned(model, on_device - 1, kept)
