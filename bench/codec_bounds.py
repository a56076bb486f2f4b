"""Entropy bounds of bf16 pages: what an ideal code of order 0 would reach, alone and with predicted exponents."""

from __future__ import annotations

import numpy as np
import torch

TILE = 65536  # elements that share their channels' means


def entropy(symbols: np.ndarray) -> float:
    """Bits a symbol of a code that knows the frequencies."""
    counts = np.unique(symbols, return_counts=True)[1]
    share = counts / counts.sum()
    return float(-(share * np.log2(share)).sum())


def split(tensor: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Exponents, and sign with mantissa, as [rows, columns]."""
    words = tensor.contiguous().view(torch.int16).numpy().view(np.uint16).reshape(-1, tensor.shape[-1])
    return (words >> 7 & 255).astype(np.int32), (words & 127 | words >> 8 & 128).astype(np.uint8)


def residuals(exponents: np.ndarray, rows: bool, channels: bool) -> tuple[np.ndarray, float]:
    """Exponents less their prediction round(row mean + channel offset), and side bits an element."""
    cols = exponents.shape[1]
    height = max(TILE // cols, 1)
    parts = []
    for start in range(0, len(exponents), height):
        tile = exponents[start : start + height]
        mean = tile.mean()
        row = tile.mean(1, keepdims=True) if rows else np.full((len(tile), 1), mean)
        channel = tile.mean(0, keepdims=True) - mean if channels else np.zeros((1, cols))
        predicted = np.rint(row + channel) if rows or channels else np.zeros_like(tile)
        parts.append((tile - predicted).astype(np.int32))
    return np.concatenate(parts), (8 / cols if rows else 0.0) + (8 / height if channels else 0.0)


def bounds(tensor: torch.Tensor) -> dict[str, float]:
    """Ratios that are bounds, of a bf16 tensor.

    "plain": exponents by their own entropy, sign and mantissa by theirs. "predicted": exponents by the entropy of
    the best of four predictions (none, row, channel, both), their means counted at a byte each.
    """
    exponents, rest = split(tensor)
    rest_bits = min(entropy(rest), 8.0)
    plain = entropy(exponents)
    best = plain
    for rows, channels in ((True, False), (False, True), (True, True)):
        left, side = residuals(exponents, rows, channels)
        best = min(best, entropy(left) + side)
    return {
        "exponent_bits": plain,
        "predicted_bits": best,
        "rest_bits": rest_bits,
        "plain": 16 / (rest_bits + plain),
        "predicted": 16 / (rest_bits + best),
    }
