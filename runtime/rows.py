"""Rows: full training sequences, and the checks that they can be trained on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tiercache.errors import InputError


@dataclass(frozen=True, slots=True)
class Row:
    """One full training sequence: prompt and completion, without padding.

    Attributes:
        tokens: [T] int64, every real token of the row.
        scored: [T] bool; where True, the log-probability of that token given those before it is wanted.
        data: whatever the caller's loss needs of this row (advantage, old log-probs); never read here.
    """

    tokens: torch.Tensor
    scored: torch.Tensor
    data: Any = None


@dataclass(frozen=True, slots=True)
class TokenRow:
    """A checked row on the host.

    Attributes:
        tokens: [T] int64.
        scored: [S] int64 positions, ascending, none of them 0.
        columns: [T] int64 column of each token in the caller's own (padded) row.
    """

    tokens: npt.NDArray[np.int64]
    scored: npt.NDArray[np.int64]
    columns: npt.NDArray[np.int64]


def _check_tokens(tokens: npt.NDArray[np.int64], vocab_size: int, index: int) -> None:
    if tokens.size == 0:
        raise InputError(
            f"row {index}: no tokens",
            got=0,
            limit="at least 1 token",
            remedy="drop empty rows from the batch",
        )
    low, high = int(tokens.min()), int(tokens.max())
    if low < 0 or high >= vocab_size:
        raise InputError(
            f"row {index}: token id out of range",
            got=low if low < 0 else high,
            limit=f"0..{vocab_size - 1}",
            remedy="use the tokenizer that belongs to the model; mark padding in attention_mask",
        )


def _check_scored(scored: npt.NDArray[np.bool_], index: int) -> npt.NDArray[np.int64]:
    if scored.size and scored[0]:
        raise InputError(
            f"row {index}: the first token is scored",
            got="scored position 0",
            limit="positions from 1 on",
            remedy="nothing comes before it, so nothing can predict it: leave it out of `scored`",
        )
    return np.flatnonzero(scored).astype(np.int64)


def check_rows(rows: Sequence[Row], vocab_size: int) -> list[TokenRow]:
    """Copies rows to the host and checks them. Rows may live on any device.

    Raises:
        InputError: empty batch, wrong dtype or shape, token id out of range, position 0 scored.
    """
    if len(rows) == 0:
        raise InputError("empty batch", got="0 rows", limit="at least 1", remedy="skip the step")
    checked = []
    kinds = {(row.tokens.dtype, row.tokens.device) for row in rows}
    if len(kinds) > 1:
        raise InputError(
            "rows of different dtypes or devices",
            got=sorted(f"{dtype} on {device}" for dtype, device in kinds),
            limit="one dtype and device",
            remedy="move every row's tokens to one device as int64",
        )
    for index, row in enumerate(rows):
        if row.tokens.ndim != 1 or row.tokens.dtype not in (torch.int64, torch.int32):
            raise InputError(
                f"row {index}: tokens",
                got=f"{row.tokens.dtype} of shape {tuple(row.tokens.shape)}",
                limit="one-dimensional int64 or int32",
            )
        if row.scored.shape != row.tokens.shape or row.scored.dtype != torch.bool:
            raise InputError(
                f"row {index}: scored",
                got=f"{row.scored.dtype} of shape {tuple(row.scored.shape)}",
                limit=f"bool of shape {tuple(row.tokens.shape)}",
                remedy="give one bool a token",
            )
        tokens = row.tokens.detach().to("cpu", torch.int64).numpy()
        _check_tokens(tokens, vocab_size, index)
        scored = _check_scored(row.scored.detach().cpu().numpy(), index)
        checked.append(TokenRow(tokens, scored, np.arange(tokens.size)))
    return checked


def check_batch(
    input_ids: torch.Tensor, attention_mask: torch.Tensor | None, scored: torch.Tensor, vocab_size: int
) -> list[TokenRow]:
    """Strips the padding of a batch. Positions of a row count its real tokens.

    Args:
        input_ids: [N, T] int64.
        attention_mask: [N, T], nonzero where a token is real, or None when all are. Left or right padding.
        scored: [N, T] bool.
        vocab_size: of the model.

    Raises:
        InputError: wrong shapes, a mask with holes, and all that `check_rows` refuses.
    """
    if input_ids.ndim != 2 or input_ids.shape[0] == 0 or input_ids.shape[1] == 0:
        raise InputError("input_ids", got=f"shape {tuple(input_ids.shape)}", limit="[N, T] with N, T >= 1")
    if input_ids.dtype not in (torch.int64, torch.int32):
        raise InputError("input_ids", got=str(input_ids.dtype), limit="int64 or int32")
    mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
    for name, value in (("attention_mask", mask), ("scored", scored)):
        if value.shape != input_ids.shape:
            raise InputError(name, got=f"shape {tuple(value.shape)}", limit=f"shape {tuple(input_ids.shape)}")
        if value.device != input_ids.device:
            raise InputError(name, got=f"on {value.device}", limit=f"on {input_ids.device}, like input_ids")
    if scored.dtype != torch.bool:
        raise InputError("scored", got=str(scored.dtype), limit="bool", remedy="pass scored.bool()")
    ids = input_ids.detach().to("cpu", torch.int64).numpy()
    real = mask.detach().cpu().numpy() != 0
    wanted = scored.detach().cpu().numpy()
    return [_strip(ids[n], real[n], wanted[n], vocab_size, n) for n in range(ids.shape[0])]


def _strip(
    ids: npt.NDArray[np.int64],
    real: npt.NDArray[np.bool_],
    wanted: npt.NDArray[np.bool_],
    vocab_size: int,
    index: int,
) -> TokenRow:
    columns = np.flatnonzero(real).astype(np.int64)
    if columns.size and columns[-1] - columns[0] + 1 != columns.size:
        raise InputError(
            f"row {index}: attention_mask has holes",
            got=f"{columns.size} real tokens over columns {columns[0]}..{columns[-1]}",
            limit="one run of real tokens, padding on the left or right only",
            remedy="remove the masked tokens from the row",
        )
    if wanted[~real].any():
        raise InputError(
            f"row {index}: a padded position is scored",
            got=f"column {int(np.flatnonzero(wanted & ~real)[0])}",
            limit="real tokens",
            remedy="use scored & attention_mask.bool()",
        )
    _check_tokens(ids[columns], vocab_size, index)
    return TokenRow(ids[columns], _check_scored(wanted[columns], index), columns)
