"""Machines that a job may be planned for: presets from public datasheets, or a profile of one's own.

A datasheet gives peaks. What a training step reaches of them is assumed, the same for every preset, and said in
the plan.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from tiercache.errors import ConfigError
from tiercache.profile import ComputeSpeed, Profile, TierSpeed, load_profile
from tiercache.usual import usual_profile

REACHED = {"matmul": 0.7, "attention": 0.5, "attention backward": 0.4, "memory": 0.8, "link": 0.8}
"""Shares of a datasheet's peaks that plans count with."""
_OP_S = 6e-6
_LATENCY_S = 20e-6
_DRIVE = TierSpeed(read_bytes_per_s=5e9, write_bytes_per_s=3e9, read_latency_s=1e-4, write_latency_s=1e-4)


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """One accelerator's datasheet.

    Attributes:
        memory_bytes: of the card.
        bf16_flops_per_s: dense matrix products in bf16 with fp32 sums.
        fp32_flops_per_s: without tensor cores.
        memory_bytes_per_s: of its own memory.
        link_bytes_per_s: to the host, one direction.
        source: of these figures.
    """

    memory_bytes: int
    bf16_flops_per_s: float
    fp32_flops_per_s: float
    memory_bytes_per_s: float
    link_bytes_per_s: float
    source: str


def _card(
    memory_gb: float, bf16_tflops: float, fp32_tflops: float, memory_tbs: float, link_gbs: float, source: str
) -> Card:
    return Card(
        memory_bytes=int(memory_gb * 1e9),
        bf16_flops_per_s=bf16_tflops * 1e12,
        fp32_flops_per_s=fp32_tflops * 1e12,
        memory_bytes_per_s=memory_tbs * 1e12,
        link_bytes_per_s=link_gbs * 1e9,
        source=source,
    )


CARDS = {
    "A100-40GB": _card(40, 312, 19.5, 1.555, 32, "NVIDIA A100 Tensor Core GPU datasheet, SXM 40GB"),
    "A100-80GB": _card(80, 312, 19.5, 2.039, 32, "NVIDIA A100 Tensor Core GPU datasheet, SXM 80GB"),
    "H100": _card(80, 989, 67, 3.35, 64, "NVIDIA H100 Tensor Core GPU datasheet, SXM; half of the sparse peak"),
    "H200": _card(141, 989, 67, 4.8, 64, "NVIDIA H200 Tensor Core GPU datasheet, SXM; half of the sparse peak"),
    "H20": _card(96, 148, 44, 4.0, 64, "NVIDIA H20 product brief as the press printed it: 96 GB, 148 TFLOPS, 4 TB/s"),
    "L40S": _card(48, 362, 91.6, 0.864, 32, "NVIDIA L40S datasheet; half of the sparse peak"),
    "RTX4090": _card(24, 165.2, 82.6, 1.008, 32, "NVIDIA Ada GPU architecture whitepaper, GeForce RTX 4090"),
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """What a job would run on.

    Attributes:
        name: as it was asked for.
        source: of the figures.
        profile: speeds.
        num_devices: that compute; 1 where the host does.
        device_bytes: memory of one of them.
        host_bytes: memory of the host, for all devices together.
        on_host: the host computes: device and host tiers are one memory.
    """

    name: str
    source: str
    profile: Profile
    num_devices: int
    device_bytes: int
    host_bytes: int
    on_host: bool


def find_hardware(name: str, host_bytes: int | None = None) -> Hardware:
    """A machine by "8xH20", "H200", or the path of a profile file.

    Args:
        name: as above.
        host_bytes: memory of the host; of a preset 256 GB a card by default, what an eight-card server with 2 TB has.

    Raises:
        ConfigError: no such preset and no such file.
    """
    match = re.fullmatch(r"(?:(\d+)x)?(.+)", name)
    assert match is not None
    count, card = int(match[1] or 1), CARDS.get(match[2])
    if card is not None and count > 0:
        return Hardware(
            name=name,
            source=card.source,
            profile=_profile_of(card),
            num_devices=count,
            device_bytes=card.memory_bytes,
            host_bytes=host_bytes if host_bytes is not None else count * 256 * 10**9,
            on_host=False,
        )
    if not Path(name).is_file():
        raise ConfigError(
            "hardware: unknown",
            got=name,
            limit=f"[COUNTx]{' | '.join(CARDS)}, or a profile file",
            remedy="measure a machine of your own with tiercache profile --json FILE",
        )
    profile = load_profile(name)
    machine = profile.machine
    if machine is None:
        raise ConfigError(
            f"profile {name}: says nothing of its machine", remedy="write it with tiercache profile"
        )
    on_host = machine.accelerator is None
    return Hardware(
        name=name,
        source=f"measured on {machine.accelerator or machine.processor}",
        profile=profile,
        num_devices=max(1, machine.num_accelerators),
        device_bytes=machine.memory_bytes if on_host else machine.accelerator_bytes,
        host_bytes=host_bytes if host_bytes is not None else machine.memory_bytes,
        on_host=on_host,
    )


def _profile_of(card: Card) -> Profile:
    def speeds(flops_per_s: float) -> ComputeSpeed:
        return ComputeSpeed(
            matmul_flops_per_s=REACHED["matmul"] * flops_per_s,
            attention_flops_per_s=REACHED["attention"] * flops_per_s,
            attention_backward_flops_per_s=REACHED["attention backward"] * flops_per_s,
        )

    half, link = speeds(card.bf16_flops_per_s), REACHED["link"] * card.link_bytes_per_s
    host = TierSpeed(
        read_bytes_per_s=link, write_bytes_per_s=link, read_latency_s=_LATENCY_S, write_latency_s=_LATENCY_S
    )
    return Profile(
        tiers={"host": host, "disk": _DRIVE},
        codecs=usual_profile(accelerator=True).codecs,
        compute={"bfloat16": half, "float16": half, "float32": speeds(card.fp32_flops_per_s)},
        memory_bytes_per_s=REACHED["memory"] * card.memory_bytes_per_s,
        op_s=_OP_S,
    )
