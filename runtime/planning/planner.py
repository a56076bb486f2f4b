"""Planning a job: every choice of `prefix_activations` on one machine, what fails, and what to use."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from tiercache.errors import ConfigError, PlanError
from tiercache.runtime.limits import Limits, choose_limits
from tiercache.runtime.needs import check_device, least_device_bytes
from tiercache.runtime.options import KEPT_ACTIVATIONS, ReplayOptions
from tiercache.runtime.planning.estimate import Budgets, Estimate, estimate_step
from tiercache.runtime.planning.hardware import REACHED, Hardware
from tiercache.runtime.planning.model import Outline, without_bytes
from tiercache.runtime.planning.rehearsal import Sizes
from tiercache.runtime.planning.stage import Stage
from tiercache.runtime.rows import TokenRow
from tiercache.runtime.schedule import Visit, plan_visits
from tiercache.runtime.tree import Tree, build_tree

OPTIMIZER_BYTES = {"none": 0, "sgd": 0, "adamw": 8}
"""A parameter's optimizer state: AdamW keeps two fp32 moments."""
_STORE_SHARE = 0.3  # of what weights and sums leave: a visit's activations are let grow to half as much again
_HOST_SHARE = 0.8
_SMALLEST_BUDGET = 1 << 26
_CONTEXT_PARALLEL = (
    "one prompt is captured whole on every rank; to share it out needs context parallelism, which tiercache does not "
    "have yet"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A step: `branches` tails over one prompt.

    Attributes:
        prompt_tokens, tail_tokens, branches: of the step.
        dtype: of the weights.
        optimizer: whose state lies on the device too; a key of `OPTIMIZER_BYTES`.
    """

    prompt_tokens: int
    tail_tokens: int
    branches: int
    dtype: torch.dtype = torch.bfloat16
    optimizer: str = "adamw"

    def __post_init__(self) -> None:
        for what in ("prompt_tokens", "tail_tokens", "branches"):
            if getattr(self, what) < 1:
                raise ConfigError(f"plan: {what}", got=getattr(self, what), limit=">= 1")
        if self.optimizer not in OPTIMIZER_BYTES:
            raise ConfigError("plan: optimizer", got=self.optimizer, limit=" | ".join(OPTIMIZER_BYTES))

    def rows(self) -> list[TokenRow]:
        """Rows of that shape; the tokens mean nothing."""
        prompt, rows = np.zeros(self.prompt_tokens, np.int64), []
        for branch in range(self.branches):
            tokens = np.concatenate([prompt, np.full(self.tail_tokens, 1 + branch, np.int64)])
            rows.append(TokenRow(tokens, np.arange(self.prompt_tokens, len(tokens)), np.arange(len(tokens))))
        return rows


@dataclass(slots=True)
class Choice:
    """One value of `prefix_activations`.

    Attributes:
        name: the value.
        settings: the store's budgets and the replay's limits, as options.
        estimate: of the step on one rank.
        device_bytes: peak of one device's memory, by what it holds.
        faults: why it cannot run; empty when it can.
    """

    name: str
    settings: dict[str, Any]
    estimate: Estimate
    device_bytes: dict[str, int]
    faults: list[str] = field(default_factory=list)

    @property
    def peak_device_bytes(self) -> int:
        """Of one device."""
        return sum(self.device_bytes.values())


@dataclass(slots=True)
class Planned:
    """What was found.

    Attributes:
        job, hardware, outline: that were asked about.
        choices: by name.
        notes: what the figures rest on.
    """

    job: Job
    hardware: Hardware
    outline: Outline
    choices: list[Choice]
    notes: list[str]

    @property
    def recommended(self) -> Choice | None:
        """The fastest choice that can run; None when none can."""
        able = [choice for choice in self.choices if not choice.faults]
        return min(able, key=lambda choice: choice.estimate.seconds, default=None)


def plan_job(
    config: Any,
    job: Job,
    hardware: Hardware,
    *,
    device: int | None = None,
    host: int | None = None,
    disk: int = 0,
    names: tuple[str, ...] = KEPT_ACTIVATIONS,
    **options: Any,
) -> Planned:
    """Plans a step without any weights.

    Args:
        config: a Transformers configuration.
        job: the step.
        hardware: the machine.
        device: budget of the device tier; a share of what weights and sums leave by default.
        host: of the host tier of one rank; most of the host's memory, shared among the devices, by default.
        disk: of the disk tier of one rank.
        names: values of `prefix_activations` to look at.
        options: further fields of `ReplayOptions`.

    Raises:
        PlanError: a budget below what one visit needs; the error names the least.
        ConfigError: the model or an option cannot be meant.
    """
    with without_bytes():
        stage = Stage.of(config, job.dtype)
        planner = _Planner(
            stage, job, hardware, device, Budgets(device=0, host=_host(host, hardware), disk=disk), options
        )
        choices = [planner.choose(name) for name in names]
    return Planned(job, hardware, stage.outline, choices, _notes(job, hardware))


def _host(host: int | None, hardware: Hardware) -> int:
    return host if host is not None else int(_HOST_SHARE * hardware.host_bytes / hardware.num_devices)


def _notes(job: Job, hardware: Hardware) -> list[str]:
    notes = [f"figures of the machine: {hardware.source}"]
    if hardware.profile.machine is None:
        shares = ", ".join(f"{what} {share:.0%}" for what, share in REACHED.items())
        notes.append(f"assumed to be reached of the datasheet's peaks: {shares}")
    if hardware.num_devices > 1:
        shared = -(-job.branches // hardware.num_devices)
        notes.append(
            f"{hardware.num_devices} devices: each replays at most {shared} of the {job.branches} branches, and "
            f"{_CONTEXT_PARALLEL}"
        )
    return notes


@dataclass(slots=True)
class _Planner:
    """One job on one machine; `budgets` has the host's and the disk's, `device` the caller's own or None."""

    stage: Stage
    job: Job
    hardware: Hardware
    device: int | None
    budgets: Budgets
    options: dict[str, Any]

    def choose(self, name: str) -> Choice:
        """One choice, its device budget halved until a visit fits beside it, unless the caller fixed the budget."""
        free = int(0.95 * self.hardware.device_bytes) - sum(self._held().values()) - self.stage.sum_bytes
        budget = self.device if self.device is not None else max(1 << 30, int(_STORE_SHARE * free))
        while True:
            choice = self._try(name, replace(self.budgets, device=budget))
            fits = choice.peak_device_bytes <= self.hardware.device_bytes
            if self.device is not None or free <= 0 or fits or budget < _SMALLEST_BUDGET:
                return choice
            budget //= 2

    def _held(self) -> dict[str, int]:
        outline = self.stage.outline
        return {
            "weights": outline.parameter_bytes,
            "optimizer": outline.num_parameters * OPTIMIZER_BYTES[self.job.optimizer],
        }

    def _try(self, name: str, budgets: Budgets) -> Choice:
        hardware, job = self.hardware, self.job
        options = ReplayOptions(check_model=False, prefix_activations=name, **self.options)  # type: ignore[arg-type]
        shape = self.stage.shape()
        limits = choose_limits(options, shape, budgets.device, on_host=hardware.on_host)
        shared = replace(job, branches=-(-job.branches // hardware.num_devices))
        tree = build_tree(
            shared.rows(),
            min_shared_tokens=options.min_shared_tokens,
            max_node_tokens=limits.max_node_tokens,
            max_tail_tokens=limits.max_tail_tokens,
        )
        visits = plan_visits(tree, max_visit_tokens=limits.max_visit_tokens, passes="step")
        nodes = [len(node.tokens) for node in tree.nodes if not node.is_leaf]
        node_tokens = max(nodes, default=limits.max_node_tokens)
        full = Sizes(node_tokens, tuple(_full_visit(tree, visits)))
        limits = replace(limits, max_node_tokens=node_tokens)
        if nodes:
            least = least_device_bytes(self.stage.shape(options.prefix_activations), node_tokens)
            check_device(least, budgets.device, PlanError)
        rehearsal = self.stage.rehearse(options, full, hardware.profile, min(3, max(2, len(nodes))))
        estimate = estimate_step(tree, visits, rehearsal, shape, budgets, hardware.profile)
        replays_once = sum(visit.kind == "replay" for visit in visits) == 1
        memory = self._held() | {
            "sums": rehearsal.sum_bytes,
            "visit": estimate.visit_bytes
            - (rehearsal.reused_bytes if replays_once and hardware.on_host else 0),
            "store": math.ceil(estimate.tier_bytes["device"]),
        }
        choice = Choice(name, _settings(name, limits, budgets, estimate), estimate, memory)
        choice.faults = _faults(choice, hardware, budgets)
        return choice


def _settings(name: str, limits: Limits, budgets: Budgets, estimate: Estimate) -> dict[str, Any]:
    return {
        "prefix_activations": name,
        "device": budgets.device,
        "host": min(budgets.host, math.ceil(1.05 * estimate.tier_bytes["host"])),
        "disk_capacity": math.ceil(1.1 * estimate.tier_bytes["disk"]),
        "max_node_tokens": limits.max_node_tokens,
        "max_visit_tokens": limits.max_visit_tokens,
    }


def _full_visit(tree: Tree, visits: list[Visit]) -> list[int]:
    """Tokens of each tail of the largest visit of tails."""
    replays = [[len(tree.nodes[n].tokens) for n in visit.nodes] for visit in visits if visit.kind == "replay"]
    return max(replays, key=sum)


def _faults(choice: Choice, hardware: Hardware, budgets: Budgets) -> list[str]:
    faults, tiers = [], choice.estimate.tier_bytes
    peak = choice.peak_device_bytes + (tiers["host"] if hardware.on_host else 0)
    if peak > hardware.device_bytes:
        parts = ", ".join(f"{what} {size / 1e9:.1f}" for what, size in choice.device_bytes.items() if size)
        faults.append(
            f"device memory: {peak / 1e9:.1f} GB of {hardware.device_bytes / 1e9:.1f} GB ({parts}). Every rank holds "
            f"the whole model during a step; {_CONTEXT_PARALLEL}"
        )
    if tiers["disk"] > budgets.disk:
        faults.append(
            f"pages: {choice.estimate.page_bytes / 1e9:.1f} GB, of which {tiers['disk'] / 1e9:.1f} GB need a disk tier "
            f"of each rank and there are {budgets.disk / 1e9:.1f} GB. Give more --host or --disk; {_CONTEXT_PARALLEL}"
        )
    return faults
