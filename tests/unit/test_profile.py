"""The profile file: one format for planner and tuner, and what is refused."""

from __future__ import annotations

import json
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tiercache.errors import ConfigError
from tiercache.measure.machine import this_machine
from tiercache.measure.quick import measure_quickly
from tiercache.policies.profiles import USUAL, read_profile
from tiercache.profile import Profile, TierSpeed, load_profile
from tiercache.runtime.speed import attention_kernels
from tiercache.usual import usual_profile


@pytest.fixture
def profile() -> Profile:
    """The usual machine's figures, as this one's."""
    return replace(usual_profile(accelerator=False), machine=this_machine())


def test_a_profile_comes_back_as_it_was_saved(profile: Profile, tmp_path: Path) -> None:
    profile.save(tmp_path / "machine.json")
    assert load_profile(tmp_path / "machine.json") == profile


def test_the_tuner_reads_the_same_file(profile: Profile, tmp_path: Path) -> None:
    changed = dict(profile.tiers) | {
        "disk": TierSpeed(read_bytes_per_s=7e8, write_bytes_per_s=1e8, read_latency_s=2e-3)
    }
    replace(profile, tiers=changed).save(tmp_path / "machine.json")
    speeds = read_profile(tmp_path / "machine.json")
    assert (speeds["disk"].bytes_per_s, speeds["disk"].latency_s) == (7e8, 2e-3)
    assert speeds["host"].bytes_per_s == profile.tier("host").read_bytes_per_s
    assert speeds["source"] == USUAL["source"]


def test_costs_follow_from_the_figures() -> None:
    speed = TierSpeed(read_bytes_per_s=1e9, write_bytes_per_s=5e8, read_latency_s=1e-3)
    assert speed.read_s(1e9, 3) == pytest.approx(1.003)
    assert speed.write_s(1e9) == pytest.approx(2.0)
    assert usual_profile(accelerator=True).computing(torch.float64).matmul_flops_per_s == 60e12


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda told: told.update(format=0), "no profile of this format"),
        (lambda told: told.pop("tiers"), "missing or unknown"),
        (lambda told: told["tiers"]["disk"].update(speed=1), "missing or unknown"),
        (lambda told: told["tiers"]["disk"].update(read_bytes_per_s=0), "disk: read_bytes_per_s; got 0"),
        (lambda told: told["tiers"]["disk"].update(read_latency_s=-1), "disk: read_latency_s"),
        (lambda told: told["compute"]["float32"].update(matmul_flops_per_s="fast"), "matmul_flops_per_s"),
        (lambda told: told.update(op_s=float("nan")), "op_s"),
        (lambda told: told.update(codecs=[1]), "missing or unknown"),
    ],
)
def test_a_file_that_is_no_profile_is_refused(change, message, profile: Profile, tmp_path: Path) -> None:
    told = json.loads(json.dumps(profile.as_dict()))
    change(told)
    path = tmp_path / "machine.json"
    path.write_text(json.dumps(told))
    with pytest.raises(ConfigError, match=message):
        load_profile(path)


@pytest.mark.parametrize("text", ["", "[1, 2]", "{}"])
def test_a_file_without_a_document_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "machine.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"machine\.json"):
        load_profile(path)
    with pytest.raises(ConfigError, match=r"machine\.json"):
        read_profile(path)


def test_a_missing_tier_or_dtype_is_named(profile: Profile) -> None:
    with pytest.raises(ConfigError, match="tier 'tape'"):
        profile.tier("tape")
    with pytest.raises(ConfigError, match="no figures of arithmetic; got int8"):
        replace(profile, compute={}).computing(torch.int8)


def test_a_profile_of_another_machine_warns(profile: Profile) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        profile.warn_unless_of(this_machine())
        usual_profile(accelerator=False).warn_unless_of(this_machine())
    other = replace(this_machine(), cores=96, accelerator="H20")
    with pytest.warns(UserWarning, match=r"another machine \(cores: .* against 96; accelerator: .* H20\)"):
        profile.warn_unless_of(other)


def test_a_quick_profile_measures_this_device() -> None:
    found = measure_quickly(torch.device("cpu"), torch.float32, attention_kernels())
    assert found.machine == this_machine()
    speed, usual = found.computing(torch.float32), usual_profile(accelerator=False)
    assert speed != usual.computing(torch.float32)
    assert 1e8 < speed.matmul_flops_per_s < 1e14
    assert found.tier("host") != usual.tier("host")
