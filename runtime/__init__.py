"""Autograd and models: exact branch replay over a tiered store."""

from tiercache.runtime.adapters import prefix_attention
from tiercache.runtime.offloading import offload
from tiercache.runtime.parity import ParityReport, verify
from tiercache.runtime.replay import BranchReplay
from tiercache.runtime.report import StepReport
from tiercache.runtime.rows import Row

__all__ = ["BranchReplay", "ParityReport", "Row", "StepReport", "offload", "prefix_attention", "verify"]
