"""The reference: every row run whole, on its own, through torch's own autograd. Knows nothing of trees.

Modes that cut gradients have a reference here too. A `Cut` says for a row which keys are constants to which
queries, and which hidden states are constants; attention is written out here so that both are one `where`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from trees import ScoredRow, place


@dataclass(frozen=True)
class Cut:
    """What is constant in one row.

    Attributes:
        live: [len, len] bool; where False, the key and value of column j are constants to query i.
        constant_hidden: [len] bool; final hidden states that send no gradient into the model's body.
    """

    live: Tensor
    constant_hidden: Tensor


def cut_at_nodes(length: int, starts: Sequence[int]) -> Cut:
    """`prefix_gradient="detached"`: a row whose nodes begin at `starts`; what precedes a node is constant."""
    live = torch.ones(length, length, dtype=torch.bool)
    constant = torch.zeros(length, dtype=torch.bool)
    for start in sorted(starts):
        live[start:, :start] = False
        if start > 0:
            constant[start - 1] = True
    return Cut(live, constant)


def cut_at(length: int, position: int) -> Cut:
    """A gradient window that begins at `position`: what precedes it is constant to every query from it on."""
    return cut_at_nodes(length, [0, position] if 0 < position < length else [0])


def row_logprobs(model: nn.Module, tokens: Tensor, cut: Cut | None = None) -> Tensor:
    """[len] log p(token t | tokens before t); 0 at t = 0. fp32, or fp64 of an fp64 model."""
    logits = _logits(model, tokens, cut)[0]
    logits = logits if logits.dtype == torch.float64 else logits.float()
    picked = torch.log_softmax(logits[:-1], -1).gather(-1, tokens[1:, None])[:, 0]
    return torch.cat([picked.new_zeros(1), picked])


def logprobs(
    model: nn.Module, rows: Sequence[ScoredRow], side: str = "right", cuts: Sequence[Cut] | None = None
) -> Tensor:
    """[N, T] as `BranchReplay.logprobs` gives them for a batch padded on `side`, with a graph."""
    longest = max(len(row.tokens) for row in rows)
    lines = []
    for n, row in enumerate(rows):
        picked = row_logprobs(model, row.tokens, cuts[n] if cuts else None)
        line = picked.new_zeros(longest)
        line[place(row, n, longest, side)] = torch.where(row.scored, picked, 0)
        lines.append(line)
    return torch.stack(lines)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    cut: Cut | None = None,
    layer: object = None,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    selected: Tensor | None = None,
) -> Tensor:
    """Causal attention [B, H, T, Dv] of whole rows, written out; a cut makes constants."""
    groups, length = q.shape[1] // k.shape[1], q.shape[2]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = q @ k.transpose(-1, -2)
    if cut is not None:
        scores = torch.where(cut.live, scores, q @ k.detach().transpose(-1, -2))
    scores = scores * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    age = torch.arange(length)[:, None] - torch.arange(length)
    scores = scores.masked_fill((age < 0) | (age >= (window or length)), -torch.inf)
    if selected is not None:
        others = torch.ones(scores.shape[-2:]).scatter(-1, selected[0].long(), 0.0).bool()
        scores = scores.masked_fill(others, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks[:, None, None].expand(*scores.shape[:-1], 1)], -1)
    weights = torch.softmax(scores, -1)[..., :length]
    if cut is None:
        return weights @ v
    return (weights * cut.live) @ v + (weights * ~cut.live) @ v.detach()


def _logits(model: nn.Module, tokens: Tensor, cut: Cut | None) -> Tensor:
    if hasattr(model, "attention"):  # tests/plain_model.py
        given, model.attention = model.attention, partial(attention, cut=cut)
        try:
            hidden = model.hidden(tokens[None], torch.arange(len(tokens))[None])
        finally:
            model.attention = given
        if cut is not None:
            hidden = torch.where(cut.constant_hidden[:, None], hidden.detach(), hidden)
        return model.project(hidden)
    if cut is None:
        return model(input_ids=tokens[None], use_cache=False).logits
    mask = torch.ones(len(tokens), len(tokens), dtype=torch.bool).tril()[None, None]
    with _transformers_cut(model, cut):
        return model(input_ids=tokens[None], attention_mask=mask, use_cache=False).logits


@contextmanager
def _transformers_cut(model: nn.Module, cut: Cut) -> Iterator[None]:
    from transformers import AttentionInterface

    def interface(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: object, **kw: Any):
        options = {"scale": kw.get("scaling"), "window": kw.get("sliding_window")}
        options |= {"softcap": kw.get("softcap"), "sinks": kw.get("s_aux"), "selected": kw.get("indices")}
        return attention(q, k, v, cut=cut, **options).transpose(1, 2).contiguous(), None

    def detach_boundary(module: nn.Module, args: object, output: Any) -> Any:
        hidden = output.last_hidden_state
        output.last_hidden_state = torch.where(cut.constant_hidden[:, None], hidden.detach(), hidden)
        return output

    AttentionInterface.register("dense_cut", interface)
    before = model.config._attn_implementation
    hook = model.base_model.register_forward_hook(detach_boundary)
    model.config._attn_implementation = "dense_cut"
    try:
        yield
    finally:
        model.config._attn_implementation = before
        hook.remove()


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Takes every parameter's gradient off the model, in fp64."""
    taken = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            taken[name] = parameter.grad.double().clone()
        parameter.grad = None
    return taken


def weighted_sum(logps: Tensor, row: ScoredRow) -> Tensor:
    """A loss that is a sum over rows: each token has a weight of its own row's."""
    return -row.advantage * (logps * row.weights.to(logps.dtype)).sum()


def weighted_gradients(
    model: nn.Module, rows: Sequence[ScoredRow], cuts: Sequence[Cut] | None = None
) -> dict[str, Tensor]:
    """Gradients of the sum of `weighted_sum` over rows, one row at a time."""
    model.zero_grad(set_to_none=True)
    for n, row in enumerate(rows):
        if row.scored.any():
            picked = row_logprobs(model, row.tokens, cuts[n] if cuts else None)
            weighted_sum(torch.where(row.scored, picked, 0), row).backward()
    return gradients(model)


def relative_l2(got: dict[str, Tensor], want: dict[str, Tensor]) -> float:
    """||got - want|| / ||want|| over all parameters together, in fp64; a missing gradient is zero."""
    difference = sum(float((_of(got, n, g) - g).pow(2).sum()) for n, g in want.items())
    difference += sum(float(g.pow(2).sum()) for n, g in got.items() if n not in want)
    return (difference / sum(float(g.pow(2).sum()) for g in want.values())) ** 0.5


def worst_parameter(got: dict[str, Tensor], want: dict[str, Tensor]) -> tuple[float, str]:
    """The largest relative error of one parameter, and its name.

    A parameter's own norm is the measure, but no less than a thousandth of the whole gradient's: a key's
    bias has a gradient of zero, and its rounding says nothing.
    """
    whole = sum(float(g.pow(2).sum()) for g in want.values()) ** 0.5
    errors = [
        (float((_of(got, n, g) - g).norm() / max(float(g.norm()), 1e-3 * whole)), n) for n, g in want.items()
    ]
    return max(errors)


def _of(gradients: dict[str, Tensor], name: str, like: Tensor) -> Tensor:
    return gradients.get(name, torch.zeros_like(like))
