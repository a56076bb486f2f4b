"""The host arena is page-locked once, as a whole, where there is a CUDA device."""

from __future__ import annotations

import pytest
import torch

from tiercache.tiers.host import HostTier


@pytest.mark.gpu
def test_slots_are_page_locked_and_copy_beside_compute():
    if not torch.cuda.is_available():
        pytest.skip("the accelerator is not CUDA")
    torch.zeros(1, device="cuda")
    tier = HostTier(64 << 20, pin=True)
    assert tier.pinned
    slot = tier.reserve(8 << 20)
    memory = torch.from_numpy(tier.view(slot))
    assert memory.is_pinned()
    source = torch.randint(0, 256, (8 << 20,), dtype=torch.uint8, device="cuda")
    memory.copy_(source, non_blocking=True)
    torch.cuda.synchronize()
    assert torch.equal(memory, source.cpu())
    del memory
    tier.free(slot)
    tier.check_integrity()
    tier.close()
