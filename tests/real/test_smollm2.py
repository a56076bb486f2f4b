"""SmolLM2-135M on real English text: bf16 through the tree errs no more than bf16 dense training does."""

import copy

import dense
import pytest
import torch
import trees
from runs import replay_gradients

from tiercache.cli.language_models import load_causal_lm, text_tokens

PROMPT, TAIL, BRANCHES = 96, 20, 4
NOISE_RATIO = 1.1

pytestmark = [pytest.mark.real, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def model(smollm2_gguf):
    return load_causal_lm(None, str(smollm2_gguf), torch.bfloat16).eval()


@pytest.fixture(scope="module")
def case(smollm2_gguf):
    """One prompt with different continuations, all real text; the prompt's last tokens are scored by every row."""
    text = text_tokens(None, str(smollm2_gguf), PROMPT + BRANCHES * TAIL)
    weights = torch.rand(BRANCHES, PROMPT + TAIL, generator=torch.Generator().manual_seed(0)) + 0.2
    rows = []
    for n in range(BRANCHES):
        begin = PROMPT + n * TAIL
        tokens = torch.cat([text[:PROMPT], text[begin : begin + TAIL]])
        scored = torch.arange(len(tokens)) >= PROMPT - 8
        rows.append(trees.ScoredRow(tokens, scored, weights[n].double(), 1.0 if n % 2 else -0.7))
    return trees.Case(rows, {"min_shared_tokens": 1, "max_node_tokens": PROMPT // 2, "debug": False})


@pytest.fixture(scope="module")
def reference(model, case):
    """Dense gradients of the same weights in fp32."""
    return dense.weighted_gradients(copy.deepcopy(model).float(), case.rows)


def test_bf16_error_is_that_of_dense_bf16(model, case, reference, record_property):
    noise = dense.relative_l2(dense.weighted_gradients(model, case.rows), reference)
    error = dense.relative_l2(replay_gradients(model, case), reference)
    record_property("bf16_error", error)
    record_property("bf16_error_of_dense", noise)
    assert error < NOISE_RATIO * noise
    assert noise < 0.5, "on text dense bf16 is near fp32; otherwise this compares noise with noise"


def test_fp32_gradient_is_that_of_dense_fp32(model, case, reference, record_property):
    """Dense training in fp32 is itself 1.7e-5 off fp64 on these weights, and tiercache 3e-6: the sum is dense's."""
    error = dense.relative_l2(replay_gradients(copy.deepcopy(model).float(), case), reference)
    record_property("fp32_error", error)
    assert error < 5e-5
