"""What an operator costs in a rehearsal, and what room in a tier costs a choice."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tiercache.measure.machine import this_machine
from tiercache.profile import ComputeSpeed, Profile
from tiercache.runtime.kernels import Block, block_forward
from tiercache.runtime.planning.counting import Work, WorkCounter
from tiercache.runtime.planning.model import without_bytes
from tiercache.runtime.tier_room import Room, price_of_room

SPEED = ComputeSpeed(
    matmul_flops_per_s=1e9,
    attention_flops_per_s=1e9,
    attention_backward_flops_per_s=5e8,
    attention_half_queries=64.0,
)
PROFILE = Profile(
    machine=replace(this_machine(), accelerator=None),
    compute={"float32": SPEED},
    memory_bytes_per_s=1e9,
    op_s=0.0,
    fresh_s_per_byte=1e-9,
)


def counted(profile: Profile, run) -> Work:
    with without_bytes(), WorkCounter(profile) as counter:
        run(counter)
        return counter.work


@pytest.mark.parametrize("accelerator", [None, "cuda"])
def test_a_host_waits_for_a_products_operands_and_an_accelerator_computes_meanwhile(accelerator):
    profile = replace(PROFILE, machine=replace(this_machine(), accelerator=accelerator))

    def run(counter):
        with counter.uncounted():
            x, weight = torch.zeros(100, 250), torch.zeros(250, 500)
        x @ weight

    arithmetic_s = 2 * 100 * 250 * 500 / 1e9
    memory_s = 4 * (100 * 250 + 250 * 500 + 100 * 500) / 1e9
    expected = arithmetic_s + memory_s if accelerator is None else max(arithmetic_s, memory_s)
    assert counted(profile, run).matmul_s == pytest.approx(expected)


def test_large_tensors_are_new_memory_each_time_and_small_ones_once():
    def several(num_bytes):
        def run(counter):
            for _ in range(4):
                torch.empty(num_bytes, dtype=torch.uint8)

        return run

    mib = 1 << 20
    assert counted(PROFILE, several(8 * mib)).fresh_s == pytest.approx(8 * mib * 1e-9)
    assert counted(PROFILE, several(32 * mib)).fresh_s == pytest.approx(4 * 32 * mib * 1e-9)


def test_few_queries_and_short_causal_blocks_run_below_full_speed():
    def attend(queries, keys, *, causal=False):
        def run(counter):
            with counter.uncounted():
                q, k, v = (torch.zeros(1, 2, length, 16) for length in (queries, keys, keys))
            block_forward(q, k, v, Block(0.25, causal))

        work = counted(PROFILE, run)
        return work.attention_s / work.attention_flops

    assert attend(64, 512) == pytest.approx(2e-9)
    assert attend(512, 512) == pytest.approx((1 + 64 / 512) * 1e-9)
    assert attend(512, 512, causal=True) == pytest.approx((1 + 64 / 128) * 1e-9)
    assert SPEED.attention_s(1e9, 64, backward=True) == pytest.approx(4.0)


def test_room_below_the_device_is_priced_with_a_margin():
    """A byte takes 1 s down and up, in which arithmetic loses a half: 0.5 s of each, and a quarter for doubt."""
    rooms = Room("device", 0), Room("host", 1000, speed_s_per_byte=1.0, compute_share=0.5)
    assert price_of_room(0, 8, rooms, hidden_s=8.0) == (pytest.approx(1.25 * 4), "host")
    assert price_of_room(0, 8, rooms, hidden_s=6.0) == (pytest.approx(1.25 * (4 + 2)), "host")
    assert price_of_room(0, 901, rooms, hidden_s=0.0) is None
    assert price_of_room(0, 8, (Room("device", 100),), hidden_s=0.0) == (0.0, "device")
