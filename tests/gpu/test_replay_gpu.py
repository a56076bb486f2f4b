"""A replay on an accelerator: the same gradient as dense training there, through host memory and disk."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from dense import gradients, relative_l2, weighted_sum
from trees import make_case

from tiercache import open_store
from tiercache.runtime import BranchReplay
from tiercache.runtime.kernels import MASKED, Block, block_backward, block_forward

pytestmark = pytest.mark.gpu


def _blocks(length: int, device: str) -> dict[str, Block]:
    at = torch.arange(length, device=device)
    distance = at[:, None] - at[None, :]
    bias = torch.zeros(length, length, device=device).masked_fill((distance < 0) | (distance >= 40), MASKED)
    return {"causal": Block(0.2, causal=True), "full": Block(0.2), "window": Block(0.2, bias=bias)}


@pytest.mark.parametrize("kind", ["causal", "full", "window"])
@pytest.mark.parametrize(("key_dim", "value_dim"), [(64, 64), (128, 128), (96, 64), (80, 80)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
def test_block_on_the_device(kind: str, key_dim: int, value_dim: int, dtype: torch.dtype) -> None:
    """Every operator that a block may take agrees with the plain form in fp64 on the host."""
    torch.manual_seed(0)
    length, device = 200, "cuda"
    q = torch.randn(1, 6, length, key_dim, device=device, dtype=dtype)
    k = torch.randn(1, 2, length, key_dim, device=device, dtype=dtype)
    v = torch.randn(1, 2, length, value_dim, device=device, dtype=dtype)
    grad = torch.randn(1, 6, length, value_dim, device=device, dtype=dtype)
    block, host_block = _blocks(length, device)[kind], _blocks(length, "cpu")[kind]
    out, lse = block_forward(q, k, v, block)
    got = (out, lse, *block_backward(grad, q, k, v, out, lse, block))
    wide = [x.cpu().double() for x in (q, k, v, grad)]
    want_out, want_lse = block_forward(*wide[:3], host_block)
    want = (want_out, want_lse, *block_backward(wide[3], *wide[:3], want_out, want_lse, host_block))
    limit = {torch.bfloat16: 2e-2, torch.float16: 3e-3, torch.float32: 2e-5, torch.float64: 1e-12}[dtype]
    for mine, reference in zip(got, want, strict=True):
        assert float((mine.cpu().double() - reference).norm() / reference.norm()) < limit


def _model(dtype: torch.dtype) -> torch.nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=61, hidden_size=128, intermediate_size=256, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512,
    )  # fmt: skip
    return LlamaForCausalLM(config).to("cuda", dtype)


def _dense(model: torch.nn.Module, rows: list) -> dict:
    model.zero_grad(set_to_none=True)
    for row in rows:
        if row.scored.any():
            tokens = row.tokens.cuda()
            logits = model(input_ids=tokens[None], use_cache=False).logits[0]
            logps = torch.log_softmax(logits[:-1].to(torch.promote_types(logits.dtype, torch.float32)), -1)
            picked = logps.gather(-1, tokens[1:, None])[:, 0]
            picked = torch.cat([picked.new_zeros(1), picked]) * row.scored.cuda()
            (-row.advantage * (picked * row.weights.cuda().to(picked.dtype)).sum()).backward()
    return gradients(model)


def _loss(logps: torch.Tensor, row: object) -> torch.Tensor:
    return weighted_sum(logps.cpu(), row)


@pytest.mark.parametrize("name", ["chain_of_5", "depth_3", "shared_scores"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("activations", ["layer_inputs", "recompute"])
def test_gradient_on_the_device(tmp_path: Path, name: str, dtype: torch.dtype, activations: str) -> None:
    """5e-6 in fp64, since Transformers keeps norms and rotary tables in fp32; budgets so low that pages travel."""
    case, model = make_case(name), _model(dtype)
    want = _dense(model, case.rows)
    with open_store(96 << 10, host="128KiB", disk=tmp_path, disk_capacity="256MiB") as store:
        options = {"min_shared_tokens": 1, **case.options}
        replay = BranchReplay(model, store, prefix_activations=activations, **options)
        replay.backward(case.rows, _loss)
        assert relative_l2(gradients(model), want) < (5e-6 if dtype == torch.float64 else 1e-5)
        stats = store.stats()
        assert stats.bytes_peak["host"] > 0
        assert stats.bytes_peak["device"] <= 96 << 10
        store.check_integrity()


def test_bf16_beside_dense_on_the_device() -> None:
    """The error against fp64 is that of dense bf16 training, within a quarter."""
    case = make_case("depth_3")
    want = _dense(_model(torch.float64), case.rows)
    model = _model(torch.bfloat16)
    floor = relative_l2(_dense(model, case.rows), want)
    with open_store("64MiB", host="64MiB") as store:
        BranchReplay(model, store, min_shared_tokens=1).backward(case.rows, _loss)
    assert relative_l2(gradients(model), want) < 1.25 * floor
