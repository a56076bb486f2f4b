"""A model without weights: built from its configuration, on tensors without bytes."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from tiercache.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Outline:
    """A model as far as a plan needs it.

    Attributes:
        name: class of the model.
        num_parameters: of them.
        parameter_bytes: as loaded.
        num_layers: decoder layers.
        hidden_size: width of the residual stream.
        dtype: of the weights.
    """

    name: str
    num_parameters: int
    parameter_bytes: int
    num_layers: int
    hidden_size: int
    dtype: torch.dtype


def load_config(path: str | Path) -> Any:
    """A Transformers configuration from a folder, a JSON file or a name in the local cache. No weights are looked for.

    Raises:
        ConfigError: there is no configuration, or Transformers knows no such model.
    """
    try:
        import transformers
    except ImportError as error:
        raise ConfigError(
            "plan: a model's configuration needs Transformers", remedy="pip install tiercache[hf]"
        ) from error
    try:
        config = transformers.AutoConfig.from_pretrained(str(path))
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(
            f"model {path}: no configuration", got=_first_line(error), remedy="give a folder or a config.json"
        ) from error
    return config.get_text_config()


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


_GROUPED_PRODUCT = torch.ops.aten._grouped_mm.default  # noqa: SLF001 - its name


class _AnyGroupedProduct(TorchDispatchMode):
    """Experts' products in any dtype: torch tells the shape of theirs in bf16 alone, though a host runs others."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Runs one operator."""
        del types
        if func is not _GROUPED_PRODUCT or args[0].dtype == torch.bfloat16:
            return func(*args, **(kwargs or {}))
        narrow = [x.bfloat16() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for x in args]
        return func(*narrow, **(kwargs or {})).to(args[0].dtype)


@contextmanager
def without_bytes() -> Iterator[Any]:
    """Tensors made inside have shapes and dtypes and no memory."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    products = _AnyGroupedProduct()  # type: ignore[no-untyped-call]
    with FakeTensorMode() as mode, products, warnings.catch_warnings():
        # torch's own advice for compiled code: here addresses only tell parameters apart
        warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")
        yield mode


@contextmanager
def _casting_by_replacement() -> Iterator[None]:
    """Some classes cast a part of themselves as they are built, by a swap that tensors without bytes refuse."""

    def apply(self: nn.Module, function: Any, recurse: bool = True) -> nn.Module:
        for child in self.children() if recurse else ():
            apply(child, function)
        for name, parameter in self._parameters.items():
            if parameter is not None:
                self._parameters[name] = nn.Parameter(function(parameter), parameter.requires_grad)
        for name, buffer in self._buffers.items():
            self._buffers[name] = None if buffer is None else function(buffer)
        return self

    own = nn.Module._apply  # noqa: SLF001 - what every cast of a module comes to
    nn.Module._apply = apply  # type: ignore[method-assign]  # noqa: SLF001
    try:
        yield
    finally:
        nn.Module._apply = own  # type: ignore[method-assign]  # noqa: SLF001


def build_model(config: Any, dtype: torch.dtype) -> nn.Module:
    """The causal LM of a configuration, in training mode; to be called inside `without_bytes`.

    Raises:
        ConfigError: the configuration is of no causal language model.
    """
    import transformers
    from transformers.initialization import no_init_weights

    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with no_init_weights(), _casting_by_replacement():
            model: nn.Module = transformers.AutoModelForCausalLM.from_config(config)
    except (ValueError, KeyError) as error:
        raise ConfigError(
            f"model type {getattr(config, 'model_type', '?')}: no causal language model",
            got=_first_line(error),
        ) from error
    finally:
        torch.set_default_dtype(before)
    return model.train()


def outline_of(model: Any, num_layers: int) -> Outline:
    """What a plan needs to know of a model that was built without bytes."""
    parameters = list(model.parameters())
    return Outline(
        name=type(model).__name__,
        num_parameters=sum(p.numel() for p in parameters),
        parameter_bytes=sum(p.numel() * p.element_size() for p in parameters),
        num_layers=num_layers,
        hidden_size=int(model.config.hidden_size),
        dtype=next(p.dtype for p in parameters if p.is_floating_point()),
    )
