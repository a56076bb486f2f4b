"""The contenders: each takes a model and rows and leaves the gradient of their mean loss in `.grad`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from replay_workload import BenchRow, mean_loss

Contender = Callable[[list[BenchRow]], dict[str, Any]]
BUDGET = "64MiB"


def dense(model: Any, folder: Path) -> Contender:
    """Ordinary training, one row at a time; only scored positions reach the vocabulary."""
    del folder

    def step(rows: list[BenchRow]) -> dict[str, Any]:
        for row in rows:
            positions = row.scored.nonzero().squeeze(1)
            output = model(row.tokens[None], logits_to_keep=positions - 1, use_cache=False)
            mean_loss(chosen_logps(output.logits[0], row.tokens[positions]), row).backward()
        return {}

    return step


def dense_checkpointed(model: Any, folder: Path) -> Contender:
    """The same under non-reentrant gradient checkpointing of every layer."""
    model.activation_checkpointing_enable({"use_reentrant": False})
    return dense(model, folder)


def prefix_grouper(model: Any, folder: Path) -> Contender:
    """PrefixGrouper: prompt and all tails in one sequence, its attention over scaled_dot_product_attention."""
    del folder
    import prefix_grouper as library

    register_prefix_grouper()
    model.set_attn_implementation(GROUPED)

    def step(rows: list[BenchRow]) -> dict[str, Any]:
        prompt = int((~rows[0].scored).sum())
        tails = [row.tokens[prompt:] for row in rows]
        lengths = [len(tail) for tail in tails]
        grouper = library.PrefixGrouper([[prompt, *lengths]])
        tokens = torch.cat([rows[0].tokens[:prompt], *tails])
        positions = torch.cat([torch.arange(prompt), *(prompt + torch.arange(length) for length in lengths)])
        # a tail's first token is predicted by the prompt's last position, the others by the one before them
        starts = torch.tensor([prompt, *lengths]).cumsum(0)[:-1]
        before = [torch.tensor([prompt - 1])] + [
            s + torch.arange(n - 1) for s, n in zip(starts, lengths, strict=True)
        ]
        kept = torch.cat(before)
        output = model(
            tokens[None],
            position_ids=positions[None],
            logits_to_keep=kept,
            use_cache=False,
            prefix_grouper=grouper,
        )
        # the prompt's last position first, then each tail's own, in order
        logits, ends = output.logits[0], torch.tensor([length - 1 for length in lengths]).cumsum(0) + 1
        loss = logits.new_zeros((), dtype=torch.float32)
        for row, tail, end in zip(rows, tails, ends.tolist(), strict=True):
            scores = torch.cat([logits[:1], logits[end - len(tail) + 1 : end]])
            loss = loss + mean_loss(chosen_logps(scores, tail), row)
        loss.backward()
        return {}

    return step


def tiercache_exact(model: Any, folder: Path, *, codec: str = "raw", **options: Any) -> Contender:
    """Through the store: defaults, 64 MiB of device and host budget, disk for the rest."""
    import tiercache

    store = tiercache.open_store(
        device=BUDGET, host=BUDGET, disk=str(folder / "disk"), disk_capacity="16GiB", codec=codec
    )
    replay = tiercache.runtime.BranchReplay(model, store, **options)

    def step(rows: list[BenchRow]) -> dict[str, Any]:
        report = replay.backward(rows, mean_loss)
        return {"report": report.as_dict(), "store": store.stats().as_dict()}

    return step


def tiercache_detached(model: Any, folder: Path) -> Contender:
    """The published response-only closure: the prompt gets no gradient."""
    return tiercache_exact(model, folder, prefix_gradient="detached")


CONTENDERS: dict[str, Callable[..., Contender]] = {
    "dense": dense,
    "dense_checkpointed": dense_checkpointed,
    "prefix_grouper": prefix_grouper,
    "tiercache": tiercache_exact,
    "tiercache_detached": tiercache_detached,
}

GROUPED = "prefix_grouper_sdpa"


def chosen_logps(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """[n] fp32 log-probabilities of `tokens` [n] under `logits` [n, V]."""
    return torch.log_softmax(logits.float(), dim=-1).gather(1, tokens[:, None]).squeeze(1)


def register_prefix_grouper() -> None:
    """Offers PrefixGrouper to Transformers over the attention that dense training uses.

    Its stock attention needs a GPU. Here the prompt is causal, and a tail sees the prompt and itself through a
    rectangular mask, with Transformers' own call of scaled_dot_product_attention for both.
    """
    import prefix_grouper as library
    from prefix_grouper.forward import AttentionForward
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    def attend(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, module: Any, **kwargs: Any
    ) -> Any:
        del mask  # of padding; the prompt has none, and padded tail positions are dropped afterwards
        length, total = q.shape[2], k.shape[2]
        seen = None
        if length != total:
            seen = torch.ones(length, total, dtype=torch.bool).tril(total - length)[None, None]
        return sdpa_attention_forward(module, q, k, v, seen, **kwargs)[0]

    def forward(
        module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any,
        *, prefix_grouper: library.PrefixGrouper, **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:  # fmt: skip
        del attention_mask
        return AttentionForward(attend)(prefix_grouper, query, key, value, module, **kwargs), None

    AttentionInterface.register(GROUPED, forward)
