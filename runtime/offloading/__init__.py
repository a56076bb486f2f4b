"""Saved tensors of any autograd graph, kept by the store: hooks, what they leave alone, and what moves when."""

from tiercache.runtime.offloading.context import Offload, offload

__all__ = ["Offload", "offload"]
