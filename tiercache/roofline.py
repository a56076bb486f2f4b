"""Which bound holds when a visit of tails streams its prompt's pages: the arithmetic, or a tier's bandwidth."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tiercache.profile import Profile


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """The sizes that decide; by default those of an 8B model with grouped queries.

    Attributes:
        num_parameters: that a token passes.
        layers, heads, kv_heads, head_width: of attention.
        prompt_tokens: whose pages are streamed.
        dtype: of weights and pages, two bytes a number.
    """

    num_parameters: float = 8e9
    layers: int = 32
    heads: int = 32
    kv_heads: int = 8
    head_width: int = 128
    prompt_tokens: int = 32768
    dtype: str = "bfloat16"

    def page_bytes(self, *, sums: bool) -> float:
        """Of the whole prompt: keys and values read for the forward and again for the backward; with `sums` also its
        gradient pages, read and written in fp32.
        """
        numbers = 2.0 * self.prompt_tokens * self.layers * self.kv_heads * self.head_width
        return numbers * (2 * 2 + (2 * 4 if sums else 0))

    def token_s(self, profile: Profile) -> float:
        """Seconds that one token of a tail computes: forward and backward of weights and of attention to the prompt."""
        speed = profile.computing(self.dtype)
        attention = 4.0 * self.layers * self.heads * self.head_width * self.prompt_tokens
        return (
            6.0 * self.num_parameters / speed.matmul_flops_per_s
            + attention / speed.attention_flops_per_s
            + 2.5 * attention / speed.attention_backward_flops_per_s
        )


def tokens_to_hide(profile: Profile, model: Model, tier: str, *, sums: bool) -> float:
    """Tail tokens of a visit from which on its arithmetic takes longer than bringing its pages up from the tier."""
    return model.page_bytes(sums=sums) / (profile.tier(tier).read_bytes_per_s * model.token_s(profile))


def plot_roofline(profile: Profile, path: str | Path, model: Model | None = None) -> None:
    """Draws bytes a tail token against tail tokens of a visit, and what each tier brings while a token computes.

    Where a curve is above a tier's line, that tier's bandwidth is the bound; below it, arithmetic is.
    """
    from matplotlib.figure import Figure

    model = model or Model()
    tokens = np.logspace(1, 5, 100)
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for sums, label in ((False, "keys and values"), (True, "and gradient pages")):
        axes.loglog(tokens, model.page_bytes(sums=sums) / tokens, label=f"streamed: {label}")
    for number, (name, speed) in enumerate(profile.tiers.items()):
        brought = speed.read_bytes_per_s * model.token_s(profile)
        axes.axhline(
            brought, color=f"C{number + 2}", linestyle="--", label=f"{name} brings while a token computes"
        )
        axes.axvline(tokens_to_hide(profile, model, name, sums=True), color=f"C{number + 2}", linewidth=0.5)
    axes.set_xlabel("tail tokens of a visit")
    axes.set_ylabel("bytes a tail token")
    axes.set_title(
        f"{model.num_parameters / 1e9:.0f}B parameters, a prompt of {model.prompt_tokens:,} tokens: "
        "above a dashed line the tier is the bound",
        fontsize="medium",
    )
    axes.legend()
    figure.savefig(path)
