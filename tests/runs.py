"""Runs a tree through `BranchReplay`, and its cuts in the words of the dense reference."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import dense
import torch
from dense import Cut
from torch import Tensor, nn
from trees import Case, ScoredRow, pad

from tiercache import open_store
from tiercache.runtime import BranchReplay
from tiercache.runtime.rows import check_rows
from tiercache.runtime.window import constant_nodes


@contextmanager
def replay_of(model: nn.Module, case: Case, **options: Any) -> Iterator[BranchReplay]:
    """A replay over a small store that checks recomputed pages; at the end no page may be left."""
    with open_store(device="64MiB") as store:
        options = {"check_model": False, "debug": True, **case.options, **options}
        yield BranchReplay(model, store, **options)
        assert store.stats().pages == 0, "the step left pages behind"


def replay_gradients(model: nn.Module, case: Case, **options: Any) -> dict[str, Tensor]:
    """Gradients of `weighted_sum` over the case's rows by `BranchReplay.backward`."""
    model.zero_grad(set_to_none=True)
    with replay_of(model, case, **options) as replay:
        replay.backward(case.rows, dense.weighted_sum)
    return dense.gradients(model)


def objective_gradients(
    model: nn.Module, case: Case, objective: Callable[[Tensor], Tensor], side: str = "right", **options: Any
) -> tuple[Tensor, dict[str, Tensor]]:
    """Log-probs of a padded batch by `BranchReplay.logprobs`, and gradients of an objective of them."""
    model.zero_grad(set_to_none=True)
    with replay_of(model, case, **options) as replay:
        logps = replay.logprobs(*pad(case.rows, side))
        objective(logps).backward()
        return logps.detach(), dense.gradients(model)


def dense_objective(
    model: nn.Module, rows: list[ScoredRow], objective: Callable[[Tensor], Tensor], side: str = "right"
) -> tuple[Tensor, dict[str, Tensor]]:
    """The same by the dense reference."""
    model.zero_grad(set_to_none=True)
    logps = dense.logprobs(model, rows, side)
    objective(logps).backward()
    return logps.detach(), dense.gradients(model)


def cuts_of(replay: BranchReplay, rows: list[ScoredRow]) -> list[Cut]:
    """What is constant in each row by the replay's own tree: pages of constant nodes to all that follow."""
    tree = replay.engine.make_tree(check_rows(rows, replay.adapter.vocab_size))
    constants = constant_nodes(tree, replay.options.window)
    cuts = []
    for row, leaf in zip(rows, tree.leaf_of_row, strict=True):
        length = len(row.tokens)
        live = torch.ones(length, length, dtype=torch.bool)
        constant_hidden = torch.zeros(length, dtype=torch.bool)
        for node in (tree.nodes[n] for n in tree.path(leaf)):
            if node.index in constants:
                live[node.end :, node.start : node.end] = False
                if node.end < length:
                    constant_hidden[node.end - 1] = True
        cuts.append(Cut(live, constant_hidden))
    return cuts


def check_through_host_and_disk(model: nn.Module, case: Case, codec: str, folder: Path) -> None:
    """Gradients are the same bits when pages go through tiny tiers, the disk among them, by a lossless codec."""
    want = replay_gradients(model, case)
    options = {"device": "8KiB", "host": "8KiB", "disk": folder, "disk_capacity": "64MiB", "codec": codec}
    with open_store(**options) as store:
        BranchReplay(model, store, check_model=False, debug=True, **case.options).backward(
            case.rows, dense.weighted_sum
        )
        moved = store.stats().bytes_moved
    got = dense.gradients(model)
    assert all(torch.equal(got[name], want[name]) for name in want)
    assert sum(n for way, n in moved.items() if "disk" in way) > 0
