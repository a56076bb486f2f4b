"""What a model's weights are called: a name that changes with them, and can be the same in every process."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator
from itertools import chain
from typing import Any

import torch
from torch import nn

from tiercache.errors import ConfigError

_LANES = 1021  # prime: rows of a matrix that change places change lanes


class WeightsName:
    """Names the weights of one model.

    A write to a weight is seen by the tensor's version or, for writes through `.data` that leave it alone, by sums
    over all its bits; that reads every weight once a call, as any forward does.

    Args:
        model: whose parameters and buffers count.
        weights_id: the caller's name for the weights as they are now; None hashes them.
        lasting: the name must mean the same to a later process.
    """

    def __init__(self, model: nn.Module, *, weights_id: str | None = None, lasting: bool = False) -> None:
        self._model = model
        self._weights_id = weights_id
        self._lasting = lasting
        self._seen = self._mark() if weights_id is not None else b""
        self._named = self._name(weights_id.encode()) if weights_id is not None else b""

    def digest(self) -> bytes:
        """64 bytes. Raises ConfigError for tensors of a kind that cannot be hashed."""
        mark = self._mark()
        if not self._lasting:
            return mark
        if mark != self._seen:
            self._seen, self._named = mark, self._name(self._hash())
        return self._named

    def _tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """What the forward reads: all but adapters that are off."""
        idle = {id(parameter) for parameter in _idle_adapters(self._model)}
        for name, tensor in self._model.state_dict(keep_vars=True).items():
            if isinstance(tensor, torch.Tensor) and id(tensor) not in idle:
                yield name, tensor

    def _mark(self) -> bytes:
        """What shows that a tensor was written to or exchanged, in this process."""
        digest = hashlib.blake2b()
        held = {id(tensor) for tensor in chain(self._model.parameters(), self._model.buffers())}
        for _, tensor in self._tensors():
            if id(tensor) in held:  # quantised layers make further ones anew for each state_dict
                digest.update(f"{tensor.data_ptr()} {tensor._version} ".encode())  # noqa: SLF001
            digest.update(_sums(tensor.detach()))
        return digest.digest()

    def _name(self, weights: bytes) -> bytes:
        """The weights' own name and all else that is known of the model's class and parts."""
        library: Any = sys.modules.get(type(self._model).__module__.partition(".")[0])
        said = [
            type(self._model).__module__,
            type(self._model).__qualname__,
            getattr(library, "__version__", ""),
        ]
        said += [f"{name} {t.dtype} {tuple(t.shape)}" for name, t in self._tensors()]
        scales = (getattr(module, "scaling", None) for module in self._model.modules())  # of LoRA layers
        said += [repr(scale) for scale in scales if isinstance(scale, dict)]
        return hashlib.blake2b(weights + b"\0" + "\0".join(said).encode()).digest()

    def _hash(self) -> bytes:
        """BLAKE2b of all tensors."""
        digest = hashlib.blake2b()
        for name, tensor in self._tensors():
            digest.update(name.encode())
            try:
                digest.update(_bits(tensor.detach()).cpu().numpy().data)
            except (RuntimeError, TypeError) as error:
                raise ConfigError(
                    f"weights of {type(self._model).__name__}: {name} cannot be hashed",
                    got=error,
                    remedy="name the weights with weights_id",
                ) from error
        return digest.digest()


def _idle_adapters(model: nn.Module) -> Iterator[nn.Parameter]:
    """Parameters of PEFT's adapters that are switched off or not the active ones."""
    for module in model.modules():
        names = getattr(module, "adapter_layer_names", None)
        if names is None:
            continue
        active = () if getattr(module, "disable_adapters", False) else getattr(module, "active_adapters", ())
        for name in names:
            for adapter, part in getattr(module, name, {}).items():
                if adapter not in active:
                    yield from part.parameters() if isinstance(part, nn.Module) else [part]


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """Its bytes, flat; a copy where it is not contiguous."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _sums(tensor: torch.Tensor) -> bytes:
    """Sums of the 64-bit words of its bits in lanes, and what is left over; nothing for kinds without bits."""
    try:
        bits = _bits(tensor)
        whole = bits.numel() // (8 * _LANES) * 8 * _LANES
        lanes = bits[:whole].clone() if bits.data_ptr() % 8 else bits[:whole]
        summed = lanes.view(torch.int64).view(-1, _LANES).sum(dim=0)
        return bytes(summed.cpu().numpy().data) + bytes(bits[whole:].cpu().numpy().data)
    except (RuntimeError, TypeError):
        return b""
