"""What a page codec costs in accuracy: a model's gradient with it against the gradient with exact pages, by layer."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from tiercache.codecs import create_codec
from tiercache.runtime.adapters import create_adapter
from tiercache.runtime.replay import BranchReplay
from tiercache.runtime.rows import Row
from tiercache.stats import Stats
from tiercache.store import open_store

_PROMPT_TOKENS = 128
_TAIL_TOKENS = 24
_BRANCHES = 4
# The same cut whatever the budget, so that runs differ in nothing but the codec.
_CUT = {
    "min_shared_tokens": 1,
    "max_node_tokens": _PROMPT_TOKENS,
    "max_visit_tokens": _BRANCHES * _TAIL_TOKENS,
}
_STORE_BYTES = 1 << 30
_DEVICE_SHARE = 3  # of the bytes that the pages take: the others go down to the codec and come back


@dataclass(frozen=True, kw_only=True, slots=True)
class CodecParity:
    """Errors of one codec, relative L2 against exact pages, computed in fp64.

    Attributes:
        codec: its name.
        lossless: whether it keeps every bit, so that all errors must be 0.
        dtype: of the weights.
        logprob_error: of all scored tokens' log-probs.
        gradient_error: of the gradient over all parameters together.
        layers: the same for the parameters of each layer, and of each module outside the layers.
        moved_bytes: of payloads that went below the device, as the codec made them.
    """

    codec: str
    lossless: bool
    dtype: str
    logprob_error: float
    gradient_error: float
    layers: dict[str, float]
    moved_bytes: int

    @property
    def passed(self) -> bool:
        """A lossless codec changes nothing; what a lossy one may cost is the user's to say."""
        return self.moved_bytes > 0 and (
            not self.lossless or self.gradient_error == self.logprob_error == 0.0
        )

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**asdict(self), "passed": self.passed}


def codec_parity(
    model: nn.Module,
    codec: str,
    *,
    tokens: torch.Tensor | None = None,
    progress: Callable[[str], object] | None = None,
) -> CodecParity:
    """Gradients of a group of branches over one prompt, pages stored by `codec`, against exact pages.

    Args:
        model: as `BranchReplay` takes it. Only a copy of it is run.
        codec: a name of `tiercache.codecs.CODECS`; a lossy one applies to keys, values and states.
        tokens: [n] int64 of text, 256 at least, that the rows are cut from; random ids by default, on which an
            error means little.
        progress: called with what is run next, before it is.

    Raises:
        ConfigError: the codec is unknown.
        ModelRefusedError: the model can't be trained on trees.
    """
    lossless = create_codec(codec).lossless
    copied = copy.deepcopy(model).eval()
    rows = _rows(create_adapter(copied).vocab_size, tokens)
    tell = progress or (lambda _what: None)
    tell("the gradient with exact pages")
    exact_logps, exact, stats = _run(copied, rows, "raw", _STORE_BYTES)
    tell(f"the gradient with pages by {codec}")
    budget = stats.bytes_peak["device"] // _DEVICE_SHARE
    logps, gradient, stats = _run(copied, rows, codec, budget, check_model=False)  # proved by the first
    squares: dict[str, list[float]] = {}
    for name, want in exact.items():
        pair = squares.setdefault(layer_of(name), [0.0, 0.0])
        pair[0] += float((gradient[name].double() - want.double()).square().sum())
        pair[1] += float(want.double().square().sum())
    return CodecParity(
        codec=codec,
        lossless=lossless,
        dtype=str(next(copied.parameters()).dtype).removeprefix("torch."),
        logprob_error=_relative(
            (logps - exact_logps).square().sum().item(), exact_logps.square().sum().item()
        ),
        gradient_error=_relative(sum(p[0] for p in squares.values()), sum(p[1] for p in squares.values())),
        layers={name: _relative(*pair) for name, pair in squares.items()},
        moved_bytes=stats.bytes_moved.get("device->host", 0),
    )


def layer_of(name: str) -> str:
    """The layer that a parameter belongs to: its name up to the first number, else its module's."""
    parts = name.split(".")
    for place, part in enumerate(parts):
        if part.isdigit():
            return ".".join(parts[: place + 1])
    return ".".join(parts[:-1]) or name


def _relative(difference: float, reference: float) -> float:
    return float((difference / reference) ** 0.5) if reference else 0.0


def _run(
    model: nn.Module, rows: list[Row], codec: str, device_bytes: int, *, check_model: bool = True
) -> tuple[torch.Tensor, dict[str, torch.Tensor], Stats]:
    """Log-probs of the scored tokens in fp64, each parameter's gradient, and what the store did."""
    kept: dict[int, torch.Tensor] = {}

    def loss(logps: torch.Tensor, row: Row) -> torch.Tensor:
        kept[id(row)] = logps.detach()[row.scored.to(logps.device)].double().cpu()
        return -logps.sum()

    with open_store(device=device_bytes, host=_STORE_BYTES, codec=codec) as store:
        replay = BranchReplay(model, store, check_model=check_model, **_CUT)
        replay.backward(rows, loss)
        store.flush()
        stats = store.stats()
    gradient = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            gradient[name] = parameter.grad
            parameter.grad = None
    return torch.cat([kept[id(row)] for row in rows]), gradient, stats


def _rows(vocab_size: int, tokens: torch.Tensor | None) -> list[Row]:
    generator = torch.Generator().manual_seed(0)
    need = _PROMPT_TOKENS + _BRANCHES * _TAIL_TOKENS
    text = torch.randint(0, vocab_size, (need,), generator=generator) if tokens is None else tokens.cpu()
    text = text[:need] % vocab_size
    tails = text[_PROMPT_TOKENS:].view(_BRANCHES, _TAIL_TOKENS)
    ids = [torch.cat([text[:_PROMPT_TOKENS], tail]) for tail in tails]
    return [Row(row, torch.arange(len(row)) >= _PROMPT_TOKENS) for row in ids]
