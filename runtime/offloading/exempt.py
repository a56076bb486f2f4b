"""What stays in the graph as it is: parameters, small tensors, and what the store cannot keep as bytes."""

from __future__ import annotations

import torch
from torch import nn

from tiercache.runtime.offloading.storages import check_version

_PLAIN = (torch.Tensor, nn.Parameter)


def is_kept(tensor: torch.Tensor, min_bytes: int, also: tuple[type, ...] = ()) -> bool:
    """Whether a saved tensor is not worth, or not able, to be moved; tensors of the types `also` are able.

    Parameters are told by what they are a view of: nn.Linear saves `weight.t()`. Buffers need no rule here: their
    module holds them, and what somebody else holds is never moved.
    """
    kind = type(tensor)
    if not (kind in _PLAIN or kind in also) or tensor.layout != torch.strided:
        return True
    if tensor.is_quantized or tensor.is_nested or tensor.device.type == "meta":
        return True
    owner = tensor._base if tensor._base is not None else tensor  # noqa: SLF001
    # Parameters are leaves; the rest are seldom, and are spared the test of their class.
    if owner.is_leaf and (owner.requires_grad or isinstance(owner, nn.Parameter)):
        return True
    return tensor.numel() == 0 or tensor.untyped_storage().nbytes() < max(min_bytes, 1)


class Kept:
    """A saved tensor that stays where it is; only its version is watched."""

    __slots__ = ("tensor", "version")

    def __init__(self, tensor: torch.Tensor) -> None:
        # A leaf is no part of the graph that keeps it; anything else would be a cycle.
        self.tensor = tensor if tensor.is_leaf else tensor.detach()
        self.version = tensor._version  # noqa: SLF001

    def get(self) -> torch.Tensor:
        """The tensor. Raises SavedTensorChangedError."""
        check_version(f"a {type(self.tensor).__name__}", self.tensor._version, self.version)  # noqa: SLF001
        return self.tensor
