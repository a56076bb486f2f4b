"""Named sets of rows: every shape of prefix tree that the parity tests run.

Tokens are drawn from a fixed seed. A case also says how `BranchReplay` shall cut it, so that a case named
for a chain of five nodes is one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass
class ScoredRow:
    """One row, as `BranchReplay.backward` takes it, with the user's own fields.

    Attributes:
        tokens: [len] int64.
        scored: [len] bool.
        weights: [len] float64, of each token in the loss.
        advantage: of the row in policy losses.
    """

    tokens: Tensor
    scored: Tensor
    weights: Tensor
    advantage: float = 1.0


@dataclass(frozen=True)
class Case:
    """Rows and the options that cut them."""

    rows: list[ScoredRow]
    options: dict[str, Any] = field(default_factory=dict)


class _Maker:
    """Draws tokens and weights; the openings of any two draws differ."""

    def __init__(self, vocab: int, seed: int) -> None:
        self.vocab = vocab
        self.generator = torch.Generator().manual_seed(seed)
        self.drawn = 0

    def tokens(self, length: int) -> Tensor:
        drawn = torch.randint(1, self.vocab, (length,), generator=self.generator)
        self.drawn += 1
        if length:
            drawn[0] = 1 + self.drawn % (self.vocab - 1)
        return drawn

    def row(self, *pieces: Tensor, scored_from: int | None = None) -> ScoredRow:
        """Joins pieces; scores from `scored_from`, by default the last piece."""
        tokens = torch.cat(pieces)
        start = len(tokens) - len(pieces[-1]) if scored_from is None else scored_from
        scored = torch.zeros(len(tokens), dtype=torch.bool)
        scored[max(start, 1) :] = True
        weights = 0.2 + torch.rand(len(tokens), generator=self.generator, dtype=torch.float64)
        advantage = float(torch.randn((), generator=self.generator)) + 0.1
        return ScoredRow(tokens, scored, weights, advantage)


def _chain(nodes: int) -> Callable[[_Maker], Case]:
    def make(m: _Maker) -> Case:
        prompt = m.tokens(20)
        rows = [m.row(prompt, m.tokens(n)) for n in (5, 3, 7)]
        return Case(rows, {"max_node_tokens": -(-20 // nodes)})

    return make


def _one_level(m: _Maker) -> Case:
    prompt = m.tokens(13)
    return Case([m.row(prompt, m.tokens(n)) for n in (6, 1, 4, 9)])


def _depth_3(m: _Maker) -> Case:
    root, rows = m.tokens(9), []
    for middle in (m.tokens(7), m.tokens(5)):
        for inner in (m.tokens(6), m.tokens(3)):
            rows += [m.row(root, middle, inner, m.tokens(n), scored_from=9) for n in (4, 6)]
    return Case(rows)


def _duplicates(m: _Maker) -> Case:
    prompt, tail = m.tokens(10), m.tokens(6)
    return Case([m.row(prompt, tail), m.row(prompt, tail), m.row(prompt, m.tokens(5)), m.row(prompt, tail)])


def _row_inside_row(m: _Maker) -> Case:
    prompt, tail = m.tokens(10), m.tokens(12)
    return Case(
        [
            m.row(prompt, tail),
            m.row(prompt, tail[:5]),
            m.row(prompt, m.tokens(4)),
            m.row(prompt[:7], scored_from=2),
        ]
    )


def _no_shared_prefix(m: _Maker) -> Case:
    return Case([m.row(m.tokens(n), scored_from=n // 2) for n in (9, 14, 6)])


def _opening_of_3(m: _Maker) -> Case:
    opening = m.tokens(3)
    return Case([m.row(opening, m.tokens(n)) for n in (9, 12, 7, 8)])


def _opening_in_tails(m: _Maker) -> Case:
    return Case(_opening_of_3(m).rows, {"min_shared_tokens": 8})


def _shared_scores(m: _Maker) -> Case:
    """Tokens of shared nodes scored by every row with weights of its own, by one row only, and by none."""
    root, middle = m.tokens(8), m.tokens(6)
    rows = [
        m.row(root, middle, m.tokens(5), scored_from=1),
        m.row(root, middle, m.tokens(4), scored_from=3),
        m.row(root, middle, m.tokens(6), scored_from=14),
        m.row(root, m.tokens(7), scored_from=5),
    ]
    rows[1].scored[5:11] = False
    return Case(rows)


def _rows_of_one(m: _Maker) -> Case:
    token, prompt = m.tokens(1), m.tokens(7)
    return Case([m.row(token), m.row(prompt, m.tokens(4)), m.row(prompt, m.tokens(3)), m.row(prompt[:1])])


def _empty_completions(m: _Maker) -> Case:
    prompt = m.tokens(9)
    rows = [
        m.row(prompt, m.tokens(5)),
        m.row(prompt, m.tokens(0)),
        m.row(prompt, m.tokens(3)),
        m.row(prompt, m.tokens(0)),
    ]
    assert not rows[1].scored.any()
    return Case(rows)


def _all_equal(m: _Maker) -> Case:
    tokens = m.tokens(15)
    return Case([m.row(tokens, scored_from=6) for _ in range(3)])


def _single_row(m: _Maker) -> Case:
    return Case([m.row(m.tokens(12), m.tokens(9))])


_MAKERS: dict[str, Callable[[_Maker], Case]] = {
    "chain_of_1": _chain(1),
    "chain_of_2": _chain(2),
    "chain_of_5": _chain(5),
    "one_level": _one_level,
    "depth_3": _depth_3,
    "duplicate_rows": _duplicates,
    "row_inside_row": _row_inside_row,
    "no_shared_prefix": _no_shared_prefix,
    "opening_of_3": _opening_of_3,
    "opening_in_tails": _opening_in_tails,
    "shared_scores": _shared_scores,
    "rows_of_one": _rows_of_one,
    "empty_completions": _empty_completions,
    "all_equal": _all_equal,
    "single_row": _single_row,
}
NAMES = tuple(_MAKERS)


def make_case(name: str, *, vocab: int = 61, seed: int = 7) -> Case:
    """The rows of tree `name`. Every shared run becomes a node unless the case says otherwise."""
    case = _MAKERS[name](_Maker(vocab, seed))
    return Case(case.rows, {"min_shared_tokens": 1, **case.options})


def pad(rows: list[ScoredRow], side: str = "right") -> tuple[Tensor, Tensor, Tensor]:
    """input_ids, attention_mask and scored, all [N, T], padded on `side` or on both in turn ("mixed")."""
    longest = max(len(row.tokens) for row in rows)
    ids = torch.zeros(len(rows), longest, dtype=torch.int64)
    mask, scored = ids.clone(), torch.zeros(len(rows), longest, dtype=torch.bool)
    for n, row in enumerate(rows):
        where = place(row, n, longest, side)
        ids[n, where], mask[n, where], scored[n, where] = row.tokens, 1, row.scored
    return ids, mask, scored


def place(row: ScoredRow, n: int, longest: int, side: str) -> slice:
    """Where row n's tokens lie in a padded batch."""
    left = side == "left" or (side == "mixed" and n % 2 == 1)
    return slice(longest - len(row.tokens), longest) if left else slice(0, len(row.tokens))
