"""Speeds of a usual machine, for where none was measured."""

from __future__ import annotations

from tiercache.policies.profiles import USUAL
from tiercache.profile import CodecSpeed, ComputeSpeed, Profile, TierSpeed


def _usual_tier(name: str, write_share: float, compute_share: float = 1.0) -> TierSpeed:
    speed = USUAL[name]
    return TierSpeed(
        read_bytes_per_s=speed.bytes_per_s,
        write_bytes_per_s=write_share * speed.bytes_per_s,
        read_latency_s=speed.latency_s,
        write_latency_s=speed.latency_s,
        compute_share=compute_share,
    )


def usual_profile(*, accelerator: bool) -> Profile:
    """Figures of a usual machine, where none was measured.

    With an accelerator those of one of 2020's data centre cards behind PCIe 4; without, of two server cores as measured
    on one such machine (bf16 in AVX-512, copies that compute pays for).
    """
    codecs = {
        "raw": CodecSpeed(ratio=1.0, encode_bytes_per_s=8e9, decode_bytes_per_s=8e9),
        "window": CodecSpeed(ratio=1.4, encode_bytes_per_s=5e9, decode_bytes_per_s=10e9),
        "exponent": CodecSpeed(ratio=1.48, encode_bytes_per_s=4e9, decode_bytes_per_s=4e9),
        "zstd": CodecSpeed(ratio=1.27, encode_bytes_per_s=0.9e9, decode_bytes_per_s=0.9e9),
    }
    if accelerator:
        half = ComputeSpeed(
            matmul_flops_per_s=200e12, attention_flops_per_s=120e12, attention_backward_flops_per_s=100e12
        )
        single = ComputeSpeed(
            matmul_flops_per_s=60e12, attention_flops_per_s=10e12, attention_backward_flops_per_s=8e12
        )
        tiers = {"host": _usual_tier("host", 1.0), "disk": _usual_tier("disk", 0.6)}
        compute = {"bfloat16": half, "float16": half, "float32": single}
        return Profile(tiers=tiers, codecs=codecs, compute=compute, memory_bytes_per_s=1.3e12, op_s=6e-6)
    half = ComputeSpeed(
        matmul_flops_per_s=120e9, attention_flops_per_s=45e9, attention_backward_flops_per_s=50e9
    )
    single = ComputeSpeed(
        matmul_flops_per_s=55e9, attention_flops_per_s=50e9, attention_backward_flops_per_s=45e9
    )
    host = TierSpeed(
        read_bytes_per_s=6e9,
        write_bytes_per_s=6e9,
        read_latency_s=20e-6,
        write_latency_s=20e-6,
        compute_share=0.6,
    )
    disk = TierSpeed(
        read_bytes_per_s=1.5e9, write_bytes_per_s=1.2e9, read_latency_s=150e-6, write_latency_s=150e-6,
        compute_share=0.7,
    )  # fmt: skip
    return Profile(
        tiers={"host": host, "disk": disk},
        codecs=codecs,
        compute={"bfloat16": half, "float32": single},
        memory_bytes_per_s=9e9,
        op_s=4e-6,
    )
