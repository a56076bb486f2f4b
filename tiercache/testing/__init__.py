"""What tests of the store and of new tiers are made of; shipped, so that others can prove theirs.

`TierContract` is a pytest suite to inherit. `LateDevice` is a fake accelerator, `FaultTier` a tier that fails on
demand, `MemoryTier`, `FileTier` and `NullTier` are simple tiers, and `FakeClock` is time that tests move.
"""

from __future__ import annotations

from tiercache.testing.clock import FakeClock
from tiercache.testing.contract import TierContract, make_meta
from tiercache.testing.device import LateDevice
from tiercache.testing.tiers import FaultTier, FileTier, MemoryTier, NullTier

__all__ = [
    "FakeClock",
    "FaultTier",
    "FileTier",
    "LateDevice",
    "MemoryTier",
    "NullTier",
    "TierContract",
    "make_meta",
]
