"""Frozen references: the second step reads what the first one captured."""

import dense
import pytest
import torch
import trees
from plain_model import build_plain

from tiercache import open_store
from tiercache.runtime import prefix_attention
from tiercache.runtime.reference import Reference


@pytest.fixture
def model():
    return build_plain(prefix_attention).requires_grad_(requires_grad=False)


@pytest.fixture
def store(tmp_path):
    with open_store(device="64KiB", disk=tmp_path, disk_capacity="16MiB") as opened:
        yield opened


def _batches():
    """Two steps on one prompt, with completions of their own."""
    maker = trees._Maker(61, 3)
    prompt = maker.tokens(40)
    rows = [maker.row(prompt, maker.tokens(n)) for n in (5, 3, 6, 4)]
    return rows[:2], rows[2:]


@pytest.mark.parametrize("name", ["depth_3", "shared_scores", "all_equal", "no_shared_prefix"])
def test_log_probs_are_those_of_whole_rows_each_time(model, store, name):
    rows = trees.make_case(name).rows
    reference = Reference(model, store, min_shared_tokens=1)
    want = dense.logprobs(model, rows)
    for _ in range(2):
        got = reference.logprobs(*trees.pad(rows))
        assert not got.requires_grad
        assert torch.allclose(got, want, rtol=1e-12, atol=1e-12)


def test_the_second_step_reads_the_prompt_instead_of_capturing_it(model, store):
    reference = Reference(model, store, min_shared_tokens=1)
    first, second = _batches()
    reference.logprobs(*trees.pad(first))
    assert (reference.reused_tokens, reference.report.captured_tokens) == (0, 40)
    got = reference.logprobs(*trees.pad(second))
    assert (reference.reused_tokens, reference.report.captured_tokens) == (40, 0)
    assert torch.allclose(got, dense.logprobs(model, second), rtol=1e-12, atol=1e-12)
    reference.clear()
    assert store.stats().pages == 0


def test_other_weights_miss(model, store):
    reference = Reference(model, store, min_shared_tokens=1)
    first, second = _batches()
    reference.logprobs(*trees.pad(first))
    model.layers[0].down.weight.mul_(1.1)
    got = reference.logprobs(*trees.pad(second))
    assert reference.reused_tokens == 0
    assert torch.allclose(got, dense.logprobs(model, second), rtol=1e-12, atol=1e-12)


def test_no_more_prompts_are_kept_than_asked_for(model, store):
    reference = Reference(model, store, max_prompts=1, min_shared_tokens=1)
    for seed in range(3):
        maker = trees._Maker(61, seed)
        prompt = maker.tokens(20)
        reference.logprobs(*trees.pad([maker.row(prompt, maker.tokens(3)) for _ in range(2)]))
        assert store.stats().pages == 3 * 2 + 1  # keys and values of three layers, hidden states
