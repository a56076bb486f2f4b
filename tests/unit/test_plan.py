"""Planning without weights: what a rehearsal counts is what a run does, and no plan is printed that cannot run."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tiercache import open_store
from tiercache.cli import main
from tiercache.errors import ConfigError, PlanError
from tiercache.measure.machine import this_machine
from tiercache.runtime import BranchReplay, Row
from tiercache.runtime.options import KEPT_ACTIVATIONS, ReplayOptions
from tiercache.runtime.planning.hardware import CARDS, find_hardware
from tiercache.runtime.planning.layers import repeating
from tiercache.runtime.planning.model import build_model, load_config, without_bytes
from tiercache.runtime.planning.planner import Job, plan_job
from tiercache.runtime.planning.rehearsal import Rehearsal, Sizes
from tiercache.runtime.planning.stage import Stage
from tiercache.usual import usual_profile

SIZES = Sizes(node_tokens=8, tails=(4, 4))


def config(**changes: Any) -> LlamaConfig:
    """A Llama of a few kilobytes."""
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3}
    return LlamaConfig(**sizes | {"num_attention_heads": 2, "num_key_value_heads": 1} | changes)


@cache
def rehearsed(
    layers: int, *, kept: str = "layer_inputs", whole: bool = False, sizes: Sizes = SIZES
) -> Rehearsal:
    with without_bytes():
        stage = Stage.of(config(num_hidden_layers=layers), torch.float32)
        if whole:
            stage = Stage(stage.outline, [build_model(config(num_hidden_layers=layers), torch.float32)], 0)
        options = ReplayOptions(check_model=False, prefix_activations=kept)
        return stage.rehearse(options, sizes, usual_profile(accelerator=False), 3)


@pytest.mark.parametrize("kept", ["layer_inputs", "all"])
def test_few_layers_stand_for_all(kept: str) -> None:
    sizes = Sizes(node_tokens=64, tails=(32, 32))  # so long that activations are most of what is alive
    few, all_of_them = (rehearsed(3, kept=kept, whole=whole, sizes=sizes) for whole in (False, True))
    assert few.sum_bytes == all_of_them.sum_bytes
    for kind, visits in all_of_them.visits.items():
        for mine, theirs in zip(few.visits[kind], visits, strict=True):
            assert mine.traffic == theirs.traffic
            assert mine.work.seconds == pytest.approx(theirs.work.seconds, rel=1e-6)
            assert mine.work.matmul_flops == pytest.approx(theirs.work.matmul_flops)
    # most is alive at another moment where there is but one layer
    assert few.visit_bytes == pytest.approx(all_of_them.visit_bytes, rel=0.05)


@pytest.mark.parametrize("kept", KEPT_ACTIVATIONS)
def test_the_rehearsed_accesses_are_those_of_a_run(kept: str) -> None:
    """A chain of three nodes with two tails at its end, against what a store was asked by the real step."""
    rehearsal = rehearsed(2, kept=kept, whole=True)
    torch.manual_seed(0)
    model = LlamaForCausalLM(config(num_hidden_layers=2))
    prompt = torch.arange(24) % 7
    rows = [Row(torch.cat([prompt, torch.full((4,), 20 + n)]), torch.arange(28) >= 24) for n in range(2)]
    with open_store(device="64MiB") as store:
        replay = BranchReplay(
            model, store, max_node_tokens=8, max_visit_tokens=8, min_shared_tokens=1, prefix_activations=kept,
            check_model=False,
        )  # fmt: skip
        with store.record_accesses() as record:
            replay.backward(rows, lambda logps, row: logps.sum())
    made = Counter((operation, key.kind) for operation, key in record if operation != "discard")
    counted: Counter[tuple[str, str]] = Counter()
    for kind, depths in (("capture", range(3)), ("replay", [3]), ("pop", range(3))):
        for depth in depths:
            counted.update(rehearsal.visits[kind][depth].traffic.calls)
    asked = {key: n for key, n in made.items() if key[0] != "take"}
    assert {key: n for key, n in counted.items() if key[0] != "take"} == asked
    # a take that finds nothing is an access of the run and no traffic
    assert all(counted[key] <= made[key] for key in made if key[0] == "take")


def test_costs_grow_by_what_a_node_more_costs() -> None:
    rehearsal = rehearsed(2, whole=True)
    reads = [rehearsal.moved("capture", 8 * depth, "read", lambda kind: True) for depth in range(6)]
    assert reads[0] == 0
    assert reads == [pytest.approx(depth * reads[1]) for depth in range(6)]
    full = rehearsal.at_full_size(Sizes(16, SIZES.tails))
    twice = rehearsal.work("capture", 0, 8).plus(rehearsal.work("capture", 8, 8))
    assert full.work("capture", 0, 16).attention_flops == pytest.approx(twice.attention_flops)
    assert full.work("capture", 0, 16).matmul_flops == pytest.approx(twice.matmul_flops)
    assert full.work("capture", 0, 16).num_ops < twice.num_ops


def test_the_period_of_layers_is_found() -> None:
    def layers(kinds: str) -> list[torch.nn.Module]:
        return [torch.nn.Linear(ord(kind), 1) for kind in kinds]

    assert repeating(layers("aaaa")) == (0, 1)
    assert repeating(layers("aaabaaabaaab")) == (0, 4)
    assert repeating(layers("xxaaaaaa")) == (2, 1)
    assert repeating(layers("abcd")) == (0, 4)
    assert repeating(layers("ab")) == (0, 2)


def _here(tmp_path: Path, **changes: Any) -> str:
    path = tmp_path / "machine.json"
    replace(usual_profile(accelerator=False), machine=replace(this_machine(), **changes)).save(path)
    return str(path)


JOB = Job(prompt_tokens=256, tail_tokens=16, branches=4, dtype=torch.float32, optimizer="none")


@pytest.mark.parametrize(("tokens", "once"), [(64, True), (32, False)])
def test_sums_reuse_what_activations_leave_in_a_single_replay_alone(
    tmp_path: Path, tokens: int, once: bool
) -> None:
    hardware = find_hardware(_here(tmp_path))
    (choice,) = plan_job(
        config(), JOB, hardware, device=1 << 20, names=("layer_inputs",), max_visit_tokens=tokens
    ).choices
    assert (choice.device_bytes["visit"] < choice.estimate.visit_bytes) is once


def test_a_plan_names_what_each_choice_takes(tmp_path: Path) -> None:
    planned = plan_job(config(), JOB, find_hardware(_here(tmp_path)), device=1 << 20, max_node_tokens=64)
    assert [choice.name for choice in planned.choices] == list(KEPT_ACTIVATIONS)
    found = {choice.name: choice for choice in planned.choices}
    assert not any(choice.faults for choice in planned.choices)
    kv_bytes = 256 * 3 * 2 * 8 * 4  # tokens, layers, key and value, width of a head, fp32
    # all sums and pages, but for the last of four nodes, whose pages go layer by layer once their sums came: of three
    # layers the last one's are there beside all sums
    most_bytes = 2 * kv_bytes - kv_bytes / 4 * (2 / 3)
    assert found["recompute"].estimate.page_bytes == pytest.approx(most_bytes)
    assert found["layer_inputs"].estimate.page_bytes >= most_bytes + 256 * 3 * 16 * 4
    assert found["attention"].estimate.page_bytes > found["layer_inputs"].estimate.page_bytes
    pops = {name: choice.estimate.phases["pop"].work.matmul_flops for name, choice in found.items()}
    assert pops["all"] < 0.75 * pops["layer_inputs"]
    assert (
        found["attention"].estimate.phases["pop"].work.attention_flops
        < found["layer_inputs"].estimate.phases["pop"].work.attention_flops
    )
    assert planned.recommended is min(planned.choices, key=lambda choice: choice.estimate.seconds)


def test_pages_beyond_the_device_move_and_lie_below_it(tmp_path: Path) -> None:
    machine = find_hardware(_here(tmp_path))
    names = ("layer_inputs",)
    tight = plan_job(
        config(), JOB, machine, device=1 << 15, host=1 << 16, disk=1 << 30, names=names, max_node_tokens=16
    )
    roomy = plan_job(config(), JOB, machine, device=1 << 24, names=names, max_node_tokens=16)
    tiers = tight.choices[0].estimate.tier_bytes
    assert tiers["device"] == 1 << 15
    assert tiers["host"] == 1 << 16
    assert tiers["disk"] == pytest.approx(tight.choices[0].estimate.page_bytes - (1 << 15) - (1 << 16))
    assert tight.choices[0].estimate.phases["pop"].bytes_moved["disk->host"] > 0
    assert all(not phase.bytes_moved for phase in roomy.choices[0].estimate.phases.values())


def test_a_budget_below_the_least_is_refused_with_the_least(tmp_path: Path) -> None:
    with pytest.raises(
        PlanError, match=r"pages that one layer reads at once exceed .* got 1000 bytes; limit at least 4096"
    ):
        plan_job(config(), JOB, find_hardware(_here(tmp_path)), device=1000, max_node_tokens=64)


@pytest.mark.parametrize("name", ["8xH21", "0xH20", "x", "no-such-file.json"])
def test_unknown_hardware_is_refused_by_name(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"hardware: unknown; got {name}; limit .*H20"):
        find_hardware(name)


def test_presets_name_their_source_and_never_exceed_it() -> None:
    for name, card in CARDS.items():
        hardware = find_hardware(f"2x{name}")
        assert hardware.num_devices == 2
        assert hardware.source == card.source
        assert "NVIDIA" in card.source
        assert hardware.profile.computing(torch.bfloat16).matmul_flops_per_s < card.bf16_flops_per_s
        assert hardware.profile.tier("host").read_bytes_per_s < card.link_bytes_per_s


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompt_tokens": 0}, "prompt_tokens"),
        ({"branches": -1}, "branches"),
        ({"optimizer": "lion"}, "adamw"),
    ],
)
def test_a_job_that_cannot_be_meant_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        replace(JOB, **changes)


def _run(folder: Path, hardware: str, *more: str) -> int:
    config().save_pretrained(folder)
    return main([
        "plan", "--model", str(folder), "--prompt-tokens", "256", "--tail-tokens", "16", "--branches", "4",
        "--hardware", hardware, "--dtype", "float32", "--json", str(folder / "plan.json"), *more,
    ])  # fmt: skip


def test_the_command_prints_a_plan_writes_it_and_warns_of_another_machine(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.warns(UserWarning, match="another machine"):
        assert _run(tmp_path, _here(tmp_path, cores=96), "--device", "1MiB") == 0
    printed = capsys.readouterr().out
    assert 'use: open_store(device="1048576"' in printed
    found = json.loads((tmp_path / "plan.json").read_text())
    assert found["recommended"]["prefix_activations"] in KEPT_ACTIVATIONS
    assert set(found["choices"]["all"]["phases"]) == {"capture", "replay", "pop"}
    assert found["choices"]["all"]["phases"]["capture"]["tokens"] == 256
    assert found["hardware"]["source"].startswith("measured on")


def test_what_cannot_run_is_no_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A machine of 64 KiB: the weights alone are more."""
    assert _run(tmp_path, _here(tmp_path, memory_bytes=1 << 16), "--device", "1MiB", "--disk", "1GiB") == 1
    printed = capsys.readouterr().out
    assert "no plan" in printed
    assert "context parallelism, which tiercache does not have yet" in " ".join(printed.split())
    assert "use:" not in printed
    found = json.loads((tmp_path / "plan.json").read_text())
    assert found["recommended"] is None
    assert all(choice["settings"] is None for choice in found["choices"].values())


def test_a_model_without_a_configuration_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no configuration"):
        load_config(tmp_path / "nothing")


def test_the_documents_count_the_published_size_right() -> None:
    """Bytes a token and floating-point operations of docs/plan.md, from the configuration beside it."""
    docs = Path(__file__).parent.parent.parent / "docs"
    config = load_config(docs / "models" / "qwen3.6-27b.json")
    with without_bytes():
        outline = Stage.of(config, torch.bfloat16).outline
    full = [kind for kind in config.layer_types if kind == "full_attention"]
    pages = len(full) * 2 * config.num_key_value_heads * config.head_dim * 2
    inputs = config.num_hidden_layers * config.hidden_size * 2
    tokens, embedding = 2_088_960, 2 * config.vocab_size * config.hidden_size
    products = 2 * (outline.num_parameters - embedding) * tokens
    attention = len(full) * 4 * config.num_attention_heads * config.head_dim * tokens**2 / 2
    text = (docs / "plan.md").read_text()
    for told in (
        f"{outline.num_parameters / 1e9:.1f} B parameters",
        f"{outline.parameter_bytes / 1e9:.1f} GB",
        f"{2 * outline.parameter_bytes / 1e9:.1f} GB",
        f"| {pages:,} | {pages * tokens / 1e9:.1f} GB |",
        f"| {2 * pages:,} | {2 * pages * tokens / 1e9:.1f} GB |",
        f"| {inputs:,} | {inputs * tokens / 1e9:,.0f} GB |",
        f"matrix products | {products:.2e}".replace("e+", "e"),
        f"16 layers | {attention:.2e}".replace("e+", "e"),
        f"together | {products + attention:.2e}".replace("e+", "e"),
        f"{(products + attention) / (8 * CARDS['H20'].bf16_flops_per_s):.0f} s",
    ):
        assert told in text, told
