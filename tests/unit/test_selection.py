"""Ranking keys page by page finds what ranking all of them at once does."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from tiercache.runtime.frame import Ancestor, Frame, Piece
from tiercache.runtime.kernels import MASKED
from tiercache.runtime.selection import select, selected_bias


class _Store:
    def __init__(self, pages):
        self.pages = pages

    def read(self, key):
        return nullcontext(SimpleNamespace(tensor=self.pages[key.node, key.kind]))

    def put(self, key, tensor):
        self.pages[key.node, key.kind] = tensor


def _ranked(queries_TD, keys_LD, own_ND, top_k):
    """What an indexer does that scores by dot products."""

    def rank(queries, give, seen):
        scores = queries_TD[queries] @ give(own_ND[None, queries])[0].T
        top = scores.masked_fill(~seen[0], -torch.inf).topk(min(top_k, scores.shape[-1]), -1)
        return top.values, top.indices

    return rank


@pytest.mark.parametrize("top_k", [1, 7, 500])
@pytest.mark.parametrize("phase", ["capture", "replay"])
def test_the_best_of_all_pages(phase, top_k):
    lengths, own = (40, 130, 3), 150  # more queries than are ranked at a time
    generator = torch.Generator().manual_seed(3)
    total = sum(lengths) + own
    keys, queries = (torch.randn(total, 4, generator=generator) for _ in range(2))
    store, ancestors, at = _Store({}), [], 0
    for length in lengths:
        store.pages[bytes([at]), "index_key"] = keys[None, at : at + length]
        ancestors.append(Ancestor(bytes([at]), at, length, trainable=True))
        at += length
    frame = Frame(store, 1, [Piece(0, b"own", 0, own, at)], ancestors, torch.device("cpu"), phase)
    frame.records_selection = phase == "capture"
    selection = select(frame, 0, _ranked(queries[at:], keys, keys[at:], top_k), top_k)
    with selection.opened() as positions:
        found = positions.clone()
    scores = (queries @ keys.T).masked_fill(torch.ones(total, total).triu(1).bool(), -torch.inf)[at:]
    want = scores >= scores.topk(min(top_k, total), -1).values[:, -1:]
    assert found.shape == (own, top_k)
    got = selected_bias(found, 0, total, None)
    assert torch.equal(got == 0, want & (scores > -torch.inf))
    assert torch.equal(got[got != 0], got.new_full((int((got != 0).sum()),), MASKED))
    if phase == "capture":
        assert torch.equal(store.pages[b"own", "index_key"], keys[None, at:])
        assert selection.positions is None


def test_a_mask_that_holds_too():
    positions = torch.tensor([[3, 4], [5, -1]])
    window = torch.tensor([[0.0, 0.0, MASKED], [0.0, 0.0, 0.0]])
    bias = selected_bias(positions, 3, 3, window)
    assert (bias == 0).tolist() == [[True, True, False], [False, False, True]]
