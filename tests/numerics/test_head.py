"""The vocabulary projection in chunks: as precise as torch's own loss, above all where the model is sure."""

from __future__ import annotations

import pytest
import torch

from tiercache.runtime.head import ChunkedHead

TOKENS, WIDTH, VOCAB = 24, 16, 300


def sure_case(
    margin: float, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Hidden states [n, E] whose targets lead by about `margin` on top of logits near 20, weights [V, E], targets,
    and dL/dlogp.
    """
    generator = torch.Generator().manual_seed(4)
    weight = torch.randn(VOCAB, WIDTH, generator=generator, dtype=torch.float64)
    weight[:, 0] = 4.0
    targets = torch.randint(VOCAB, (TOKENS,), generator=generator)
    hidden = margin * weight[targets] / weight.square().sum(-1)[targets, None]
    hidden[:, 0] += 5.0
    grad = torch.rand(TOKENS, generator=generator, dtype=torch.float64) - 0.5
    # the same numbers in either precision
    return hidden.float().to(dtype), weight.float().to(dtype), targets, grad.float().to(dtype)


def gradients(margin: float, dtype: torch.dtype, way: str) -> torch.Tensor:
    """Of hidden states and weights together."""
    hidden, weight, targets, grad = sure_case(margin, dtype)
    weight.requires_grad_()
    if way == "dense":
        hidden.requires_grad_()
        logps = torch.log_softmax(hidden @ weight.T, -1).gather(-1, targets[:, None])[:, 0]
        logps.backward(grad)
        of_hidden = hidden.grad
    else:
        head = ChunkedHead(lambda h: h @ weight.T, VOCAB, budget_bytes=7 * VOCAB * 4 * 4)
        of_hidden = head.gradient(hidden, targets, grad)
    return torch.cat([of_hidden.flatten(), weight.grad.flatten()]).double()


@pytest.mark.parametrize("margin", [0.0, 10.0, 60.0])
def test_fp32_errs_no_more_than_log_softmax(margin: float) -> None:
    exact = gradients(margin, torch.float64, "dense")
    assert torch.allclose(gradients(margin, torch.float64, "head"), exact, rtol=1e-11, atol=1e-14)
    ours, dense = (gradients(margin, torch.float32, way) - exact for way in ("head", "dense"))
    assert float(ours.norm()) <= 1.1 * float(dense.norm())


@pytest.mark.parametrize("margin", [0.0, 10.0, 60.0])
def test_values_err_no_more_than_log_softmax(margin: float) -> None:
    hidden, weight, targets, _ = sure_case(margin, torch.float32)
    exact = torch.log_softmax(hidden.double() @ weight.double().T, -1).gather(-1, targets[:, None])
    dense = torch.log_softmax(hidden @ weight.T, -1).gather(-1, targets[:, None])
    ours = ChunkedHead(lambda h: h @ weight.T, VOCAB, budget_bytes=7 * VOCAB * 4 * 4).values(hidden, targets)
    assert float((ours - exact).norm()) <= 1.1 * float((dense - exact).norm())


@pytest.mark.parametrize("tokens", [1, 2, 3, 5])
def test_a_few_tokens_are_as_precise_as_many(tokens: int) -> None:
    vocab = 30_000
    generator = torch.Generator().manual_seed(tokens)
    hidden, weight = torch.randn(tokens, 32, generator=generator), torch.randn(vocab, 32, generator=generator)
    targets, grad = torch.randint(vocab, (tokens,), generator=generator), torch.ones(tokens)
    heads = [
        ChunkedHead(lambda h, w=w: h @ w.T, vocab, budget_bytes=1 << 30) for w in (weight, weight.double())
    ]
    exact = heads[1].gradient(hidden.double(), targets, grad.double())
    many = heads[0].gradient(hidden.repeat(16, 1), targets.repeat(16), grad.repeat(16))[:tokens]
    few = heads[0].gradient(hidden, targets, grad)
    assert float((few - exact).norm()) <= 1.5 * float((many - exact).norm())
