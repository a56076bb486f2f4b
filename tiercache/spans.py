"""Stretches of compute, named for a timeline and for NVIDIA's profilers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from tiercache.clock import Clock
from tiercache.trace import Timeline


@contextmanager
def compute_span(name: str, timeline: Timeline | None, clock: Clock) -> Iterator[None]:
    """Notes the block as compute in the timeline, if there is one, and as an NVTX range where there is CUDA."""
    has_cuda = torch.cuda.is_available()
    if has_cuda:
        torch.cuda.nvtx.range_push(name)
    start_s = clock.now()
    try:
        yield
    finally:
        if timeline is not None:
            timeline.add("compute", name, start_s, clock.now())
        if has_cuda:
            torch.cuda.nvtx.range_pop()
