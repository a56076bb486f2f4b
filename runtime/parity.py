"""The parity ladder: a model's gradient on small trees against dense training, rung by rung of precision.

In fp64 only the order of sums differs, so a mistake shows at its full size. In fp32 and in the model's own
dtype both ways round; each is measured against the fp64 gradient of dense training, and tiercache may err a
tenth more than dense training in that dtype. Few rows are a small sample of bf16's rounding: several sets are pooled.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import nn

from tiercache.errors import ConfigError
from tiercache.runtime.adapters import ModelAdapter, create_adapter
from tiercache.runtime.adapters.experts import run_experts_one_by_one
from tiercache.runtime.kernels import accumulator_dtype
from tiercache.runtime.replay import BranchReplay
from tiercache.runtime.rows import Row
from tiercache.store import open_store

FP64_LIMIT = 5e-6  # Transformers keeps norms and rotary tables in fp32 whatever the weights are
FP32_LIMIT = 1e-5
NOISE_RATIO = 1.1
_MOST_WHOLE = 300_000_000  # parameters of a model that is verified itself and not by a twin
_NODE_TOKENS = 8
SAMPLE_TOKENS = 256  # of text, for one set of rows
SAMPLES = 4  # sets of rows in a coarse dtype, where the text has room for them
_STORE_BYTES = 4 << 30


@dataclass(frozen=True, kw_only=True, slots=True)
class Rung:
    """One dtype's comparison. Errors are relative L2, computed in fp64.

    Attributes:
        dtype: of the weights.
        subject: what was run, the model itself or a tiny twin.
        logprob_error: of tiercache's log-probs.
        gradient_error: of tiercache's gradient over all parameters together.
        dense_logprob_error: of dense training in this dtype; 0 where it is itself the reference.
        dense_gradient_error: the same of its gradient.
        limit: largest error that passes, of log-probs and of the gradient.
        seconds: that the rung took.
        missing: why the rung could not be run; empty when it was.
    """

    dtype: str
    subject: str
    logprob_error: float = 0.0
    gradient_error: float = 0.0
    dense_logprob_error: float = 0.0
    dense_gradient_error: float = 0.0
    limit: tuple[float, float] = (0.0, 0.0)
    seconds: float = 0.0
    missing: str = ""

    @property
    def passed(self) -> bool:
        """Whether both errors are within their limits; a rung that could not be run does not count."""
        within = self.logprob_error <= self.limit[0] and self.gradient_error <= self.limit[1]
        return bool(self.missing) or within


@dataclass(frozen=True, slots=True)
class ParityReport:
    """The rungs, from the most precise to the model's own.

    Attributes:
        rungs: in that order.
        pages: bytes of the model's pages: of a prefix token in all layers, the same if every layer's pages held keys
            and values, and of the states at a node's end.
    """

    rungs: tuple[Rung, ...]
    pages: dict[str, int] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        """Whether some rung was run and none failed."""
        return all(r.passed for r in self.rungs) and not all(r.missing for r in self.rungs)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "passed": self.passed,
            "pages": self.pages,
            "rungs": [{**asdict(r), "passed": r.passed} for r in self.rungs],
        }


def verify(
    model: nn.Module,
    *,
    tokens: torch.Tensor | None = None,
    whole_model: bool | None = None,
    progress: Callable[[str], object] | None = None,
) -> ParityReport:
    """Compares log-probs and gradients with dense training on small trees, in fp64, fp32 and the model's dtype.

    Args:
        model: as `BranchReplay` takes it. Only copies of it are run.
        tokens: [n] int64 of text that the trees' rows are cut from, 256 at least, 1024 for a good measure of a
            coarse dtype; random ids by default. A trained model's rounding is only worth measuring on text.
        whole_model: run the model itself (copies in fp64 need 24 bytes a parameter) or a tiny twin of its
            class; by default the model itself up to 300 million parameters.
        progress: called with what is run next, before it is.

    Raises:
        ConfigError: fewer than 256 tokens.
        ModelRefusedError: the model can't be trained on trees at all; names the layer and the reason.
    """
    tell = progress or (lambda _what: None)
    tell("proof of the model")
    adapter = create_adapter(model)
    own = next(p.dtype for p in model.parameters() if p.is_floating_point())
    with open_store(device=_STORE_BYTES) as store:
        replay = BranchReplay(model, store)  # proves the model, or refuses it
        pages = replay.engine.page_sizes()
    source, subject = _subject(model, adapter, whole_model)
    samples = list(_samples(create_adapter(source).vocab_size, tokens))
    rows = samples[0]
    reference: _Result | None = None
    rungs = []
    for dtype in dict.fromkeys([torch.float64, torch.float32, own]):
        begin = time.perf_counter()
        name = str(dtype).removeprefix("torch.")
        copied = copy.deepcopy(source).to(dtype).eval()
        if dtype == torch.float64:
            run_experts_one_by_one(copied)
        tell(f"{name}: dense training of {len(rows)} rows")
        try:
            dense = _dense(copied, rows)
        except RuntimeError as error:  # an operator without this dtype
            rungs.append(Rung(dtype=name, subject=subject, missing=str(error).splitlines()[0]))
            continue
        first, reference = reference is None, reference or dense
        tell(f"{name}: the same rows as a tree")
        pairs = [(reference.squares_of(_ours(copied, rows)), reference.squares_of(dense))]
        if dtype.itemsize < torch.float32.itemsize and not first and len(samples) > 1:
            tell(f"{name}: further sets of rows, against fp32: {len(samples) - 1}")
            del dense
            pairs += _more_pairs(copied, copy.deepcopy(source).float().eval(), samples[1:])
        rungs.append(_rung(name, subject, pairs, time.perf_counter() - begin, is_reference=first))
    return ParityReport(tuple(rungs), pages)


@dataclass(slots=True)
class _Result:
    """Log-probs of all scored tokens in order, and a gradient for each parameter."""

    logps: torch.Tensor
    gradients: list[torch.Tensor | None]

    def squares_of(self, other: _Result) -> torch.Tensor:
        """[2, 2] fp64: squared L2 of another's distance from these and of these, of log-probs and of gradients."""
        want = self.logps.double()
        squares = torch.zeros(2, 2, dtype=torch.float64)
        squares[0, 0] = (other.logps.double() - want).square().sum()
        squares[0, 1] = want.square().sum()
        for mine, theirs in zip(self.gradients, other.gradients, strict=True):
            if mine is not None:
                difference = mine.double() if theirs is None else theirs.double() - mine.double()
                squares[1, 0] += difference.square().sum().cpu()
                squares[1, 1] += mine.double().square().sum().cpu()
            elif theirs is not None:
                squares[1, 0] += theirs.double().square().sum().cpu()
        return squares


_Pair = tuple[torch.Tensor, torch.Tensor]  # squares of tiercache's errors and of dense training's


def _more_pairs(model: nn.Module, precise: nn.Module, samples: Sequence[Sequence[Row]]) -> Iterator[_Pair]:
    """Errors on further sets of rows, against dense training of the `precise` copy."""
    for rows in samples:
        reference = _dense(precise, rows)
        yield reference.squares_of(_ours(model, rows)), reference.squares_of(_dense(model, rows))


def _pooled(squares: Sequence[torch.Tensor]) -> tuple[float, float]:
    """Relative L2 over all sets of rows together, of log-probs and of gradients."""
    distance, norm = torch.stack(list(squares)).sum(0).unbind(1)
    logps, gradients = (distance / norm).sqrt().tolist()
    return logps, gradients


def _rung(name: str, subject: str, pairs: Sequence[_Pair], seconds: float, *, is_reference: bool) -> Rung:
    errors = _pooled([ours for ours, _ in pairs])
    if is_reference:
        noise = (0.0, 0.0)
        limit = (FP64_LIMIT,) * 2 if name == "float64" else (FP32_LIMIT,) * 2
    else:
        noise = _pooled([dense for _, dense in pairs])
        least = FP32_LIMIT if name == "float32" else 0.0
        limit = (max(least, NOISE_RATIO * noise[0]), max(least, NOISE_RATIO * noise[1]))
    return Rung(
        dtype=name,
        subject=subject,
        logprob_error=errors[0],
        gradient_error=errors[1],
        dense_logprob_error=noise[0],
        dense_gradient_error=noise[1],
        limit=limit,
        seconds=seconds,
    )


def _subject(model: nn.Module, adapter: ModelAdapter, whole_model: bool | None) -> tuple[nn.Module, str]:
    size = sum(p.numel() for p in model.parameters())
    whole = size <= _MOST_WHOLE if whole_model is None else whole_model
    twin = None if whole else adapter.twin()
    return (model, "the model") if twin is None else (twin.model, f"a twin of {twin.described}")


def _weighted(logps: torch.Tensor, row: Row) -> torch.Tensor:
    loss: torch.Tensor = -(logps * row.data.to(logps)).sum()
    return loss


def _dense(model: nn.Module, rows: Sequence[Row]) -> _Result:
    """Every row whole, one at a time, through torch's own autograd."""
    adapter = create_adapter(model)
    model.zero_grad(set_to_none=True)
    kept = []
    for row in rows:
        tokens = row.tokens.to(adapter.device)
        logits = adapter.dense_logits(tokens[None])[:-1]
        logps = torch.log_softmax(logits.to(accumulator_dtype(logits.dtype)), -1)
        picked = torch.cat([logps.new_zeros(1), logps.gather(-1, tokens[1:, None])[:, 0]])
        picked = torch.where(row.scored.to(picked.device), picked, 0)
        _weighted(picked, row).backward()
        kept.append(picked.detach()[row.scored.to(picked.device)])
    return _Result(torch.cat(kept), list(_take(model)))


def _ours(model: nn.Module, rows: Sequence[Row]) -> _Result:
    """The rows as a tree."""
    kept: dict[int, torch.Tensor] = {}

    def loss(logps: torch.Tensor, row: Row) -> torch.Tensor:
        kept[id(row)] = logps.detach()[row.scored.to(logps.device)]
        return _weighted(logps, row)

    options = {"check_model": False, "min_shared_tokens": 1, "max_node_tokens": _NODE_TOKENS}
    with open_store(device=_STORE_BYTES) as store:
        BranchReplay(model, store, **options).backward(rows, loss)
    return _Result(torch.cat([kept[id(row)] for row in rows]), list(_take(model)))


def _take(model: nn.Module) -> Iterator[torch.Tensor | None]:
    for parameter in model.parameters():
        yield parameter.grad
        parameter.grad = None


def _samples(vocab_size: int, tokens: torch.Tensor | None) -> Iterator[list[Row]]:
    """Sets of rows, each from a text of its own."""
    generator = torch.Generator().manual_seed(0)
    if tokens is None:
        tokens = torch.randint(0, vocab_size, (SAMPLES * SAMPLE_TOKENS,), generator=generator)
    if len(tokens) < SAMPLE_TOKENS:
        raise ConfigError(
            "verify: tokens", got=len(tokens), limit=f"at least {SAMPLE_TOKENS}", remedy="give more text"
        )
    for text in (tokens.cpu() % vocab_size).split(SAMPLE_TOKENS)[:SAMPLES]:
        if len(text) == SAMPLE_TOKENS:
            yield _rows(text, generator)


def _rows(text: torch.Tensor, generator: torch.Generator) -> list[Row]:
    """A chain of three nodes with three branches, and a tree of depth three whose shared tokens are scored too.

    All lengths are multiples of four: CPUs sum rows left over from fours more coarsely, which short nodes show.
    """
    place = 0

    def take(length: int) -> torch.Tensor:
        nonlocal place
        place += length
        return text[place - length : place]

    paths = []
    prompt = take(3 * _NODE_TOKENS)
    paths += [(len(prompt), [prompt, take(n)]) for n in (8, 4, 12)]
    root = take(12)
    for middle in (take(8), take(12)):
        for inner in (take(8), take(4)):
            paths += [(len(root), [root, middle, inner, take(n)]) for n in (4, 12)]
    rows: list[Row] = []
    for first, pieces in paths:
        ids = torch.cat(pieces)
        weights = (0.2 + torch.rand(len(ids), generator=generator)) * (1 if len(rows) % 2 else -1)
        rows.append(Row(ids, torch.arange(len(ids)) >= first, weights))
    return rows
