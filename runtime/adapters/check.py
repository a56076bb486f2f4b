"""The proof that a model carries its prefix through the attention function, made once when a replay is built.

A model that keeps context anywhere else (another attention path, a recurrent state, positions of its own,
rotary tables that follow the length of the call) would train with a silently wrong gradient. So log-probs
of a few dozen tokens, run whole, are compared with the same tokens as a chain of three nodes: on the model
itself, and for Transformers models first on a tiny twin in which every limit on length lies inside those
tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from tiercache.errors import ModelRefusedError
from tiercache.runtime.adapters.base import ModelAdapter
from tiercache.runtime.adapters.mixing import refuse_hidden_mixing

NODE_TOKENS = 13
_SHARED, _LENGTH = 2 * NODE_TOKENS, 2 * NODE_TOKENS + 12
_RELATIVE = {torch.float64: 1e-4, torch.float32: 1e-4}  # what is wrong is wrong by per cents
_RELATIVE_HALF = 0.1

Scores = Callable[[nn.Module, torch.Tensor, torch.Tensor], torch.Tensor]


def check_model(adapter: ModelAdapter, scores: Scores, *, share_dropout: bool) -> None:
    """Proves a model, or refuses it. Parameters, modes and random numbers are left as they were.

    Args:
        adapter: of the model.
        scores: (model, input_ids [N, T], scored [N, T]) -> [N, T] log-probs of the rows as a tree of nodes
            of at most NODE_TOKENS tokens, without a graph.
        share_dropout: rows may share the random numbers of their prefix.

    Raises:
        ModelRefusedError: names the layer and the reason.
    """
    adapter.refuse_unsupported()
    if not share_dropout:
        _refuse_random_numbers(adapter)
    twin = adapter.twin()
    if twin is not None:
        refuse_hidden_mixing(twin)
        _compare(twin, scores, f"on a tiny twin of the model ({twin.described})")
    with _evaluating(adapter.model):
        if twin is None:
            refuse_hidden_mixing(adapter)
        _compare(adapter, scores, "on the model itself")


def _refuse_random_numbers(adapter: ModelAdapter) -> None:
    if not adapter.model.training:
        return
    remedy = "set it to 0, or pass share_dropout=True if rows may share the masks of their prefix"
    for name, module in adapter.model.named_modules():
        for field, value in _dropouts(module):
            if module.training and value > 0:
                raise ModelRefusedError(
                    f"{name} ({type(module).__name__}) has {field} in training mode",
                    got=value,
                    limit="0 (rows share the dropout masks of a shared prefix)",
                    remedy=remedy,
                )
    device = adapter.device
    devices = [] if device.type == "cpu" else [device]
    with torch.random.fork_rng(devices, device_type=device.type if devices else "cuda"), torch.no_grad():
        before = _random_states(device)
        adapter.dense_logits(torch.ones(1, 4, dtype=torch.int64, device=device))
        if not all(map(torch.equal, before, _random_states(device))):
            raise ModelRefusedError(
                f"{type(adapter.model).__name__} draws random numbers in training mode", remedy=remedy
            )


def _random_states(device: torch.device) -> list[torch.Tensor]:
    states = [torch.get_rng_state()]
    if device.type != "cpu":
        states.append(torch.get_device_module(device).get_rng_state(device))
    return states


def _dropouts(module: nn.Module) -> Iterator[tuple[str, float]]:
    if isinstance(module, nn.Dropout | nn.AlphaDropout):
        yield "dropout", module.p
    for field, value in vars(module).items():
        if isinstance(value, int | float) and ("dropout" in field or field.endswith("pdrop")):
            yield field, float(value)


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode for every module but quantised ones, and back to each module's own.

    Quantised layers draw no random numbers, and some repack their weights for inference, for good, at the first
    forward in evaluation mode: what they compute then has no gradient any more.
    """
    modes = [(module, module.training) for module in model.modules() if not _is_quantised(module)]
    for module, _ in modes:
        module.training = False
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def _is_quantised(module: nn.Module) -> bool:
    return any(not p.is_floating_point() for p in module.parameters(recurse=False))


def _compare(adapter: ModelAdapter, scores: Scores, where: str) -> None:
    """Dense log-probs of two rows against those of the rows as a tree."""
    rows = _rows(adapter.vocab_size).to(adapter.device)
    scored = torch.ones_like(rows, dtype=torch.bool)
    scored[:, 0] = False
    with torch.no_grad():
        with _outputs(adapter.layers) as dense_layers, _autocasts(adapter) as autocasts:
            logits = torch.stack([adapter.dense_logits(row[None]) for row in rows])
        dtype = logits.dtype
        dense = torch.log_softmax(logits[:, :-1].double(), -1).gather(-1, rows[:, 1:, None])[..., 0]
        same = torch.autocast(adapter.device.type, autocasts[0]) if autocasts else nullcontext()
        with _outputs(adapter.layers) as paged_layers, same:
            paged = _scores(adapter, scores, rows, scored, where)[:, 1:].double()
    error = float((paged - dense).norm() / dense.norm())
    limit = _RELATIVE_HALF if autocasts else _RELATIVE.get(dtype, _RELATIVE_HALF)
    if not error <= limit:
        layer = _first_to_differ(adapter, dense_layers, paged_layers, limit)
        raise ModelRefusedError(
            f"{layer}: log-probs over a prefix in pages differ from those of whole rows {where}",
            got=f"{error:.2e} relative",
            limit=f"{limit:.0e}",
            remedy="use a model whose attention over the prefix goes through the attention function alone; "
            "check_model=False trains with a wrong gradient",
        )


def _scores(
    adapter: ModelAdapter, scores: Scores, rows: torch.Tensor, scored: torch.Tensor, where: str
) -> torch.Tensor:
    try:
        return scores(adapter.model, rows, scored)
    except ModelRefusedError:
        raise
    except Exception as error:
        raise ModelRefusedError(
            f"{type(adapter.model).__name__} does not run over a prefix in pages {where}",
            got=f"{type(error).__name__}: {error}",
            remedy="use a model whose attention goes through the attention function alone",
        ) from error


def _rows(vocab_size: int) -> torch.Tensor:
    """Two rows of one length that share two nodes' tokens."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(0, vocab_size, (2, _LENGTH), generator=generator)
    rows[1, :_SHARED] = rows[0, :_SHARED]
    rows[1, _SHARED] = (rows[0, _SHARED] + 1) % vocab_size
    return rows


@contextmanager
def _outputs(layers: list[nn.Module]) -> Iterator[list[list[torch.Tensor]]]:
    """Hidden states [n, E] that each layer gives, call by call."""
    kept: list[list[torch.Tensor]] = [[] for _ in layers]
    handles = []
    for index, layer in enumerate(layers):

        def keep(_: nn.Module, args: Any, output: Any, index: int = index) -> None:
            del args
            hidden = output[0] if isinstance(output, tuple) else output
            kept[index].append(hidden.detach().reshape(-1, hidden.shape[-1]).double())

        handles.append(layer.register_forward_hook(keep))
    try:
        yield kept
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _autocasts(adapter: ModelAdapter) -> Iterator[list[torch.dtype]]:
    """Dtypes of the autocast that layers run under: a trainer may have wrapped the model's forward in one."""
    found: list[torch.dtype] = []
    device = adapter.device.type

    def note(_: nn.Module, args: Any) -> None:
        del args
        if torch.is_autocast_enabled(device):
            found.append(torch.get_autocast_dtype(device))

    handle = adapter.layers[0].register_forward_pre_hook(note)
    try:
        yield found
    finally:
        handle.remove()


def _first_to_differ(
    adapter: ModelAdapter, dense: list[list[torch.Tensor]], paged: list[list[torch.Tensor]], limit: float
) -> str:
    """The first layer whose hidden states along the first row's path are others than in the whole row."""
    names = {id(module): name for name, module in adapter.model.named_modules()}
    for layer, whole, parts in zip(adapter.layers, dense, paged, strict=True):
        if not whole or not parts:
            continue
        tree = torch.cat(parts)[-(_SHARED + 2 * (_LENGTH - _SHARED)) :]  # a probe may have come before
        path = tree[:_LENGTH]
        if path.shape != whole[0].shape or float((path - whole[0]).norm() / whole[0].norm()) > limit:
            return f"{names[id(layer)]} ({type(layer).__name__})"
    return f"the head of {type(adapter.model).__name__}"
