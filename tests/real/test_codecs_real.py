"""Codecs on what a trained model holds while it reads text: exact, and close to what the exponents allow."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest
import torch
from codec_pages import decoded, encoded, page_key, same_bits

from tiercache.codecs import create_codec

pytestmark = pytest.mark.real

BENCH = Path(__file__).parents[2] / "bench"
LEAST = {"exponent": 1.40, "window": 1.30}


@pytest.fixture(scope="module")
def tensors():
    spec = importlib.util.spec_from_file_location("bench_tensors", BENCH / "tensors.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.capture(1, tokens=512)


def entropy_bound(tensor):
    """Ratio that a code knowing this tensor's own exponents' frequencies would reach without a prediction."""
    exponents = tensor.view(torch.int16).numpy().view(np.uint16) >> 7 & 255
    counts = np.unique(exponents, return_counts=True)[1]
    share = counts / counts.sum()
    return 16 / (8 - (share * np.log2(share)).sum())


def test_every_tensor_is_exact_and_near_its_bound(tensors):
    assert {"k", "k_rotary", "v", "residual", "norm", "mlp", "attention", "k_grad"} <= set(tensors)
    for layer, (name, tensor) in enumerate(tensors.items()):
        for codec_name, least in LEAST.items():
            codec = create_codec(codec_name)
            payload = encoded(codec, tensor, page_key(layer=layer))
            assert same_bits(decoded(codec, payload, tensor), tensor), name
            assert tensor.nbytes / payload.size > least, (name, codec_name)
            if codec_name == "exponent":
                assert tensor.nbytes / payload.size > 0.985 * entropy_bound(tensor), name


def test_lossy_errors_on_real_tensors(tensors):
    limits = {"e4m3": 0.04, "int8": 0.04, "int4": 0.25}
    for name, kind in (("k", "key"), ("v", "value"), ("norm", "layer_input")):
        page = tensors[name]
        for codec_name, limit in limits.items():
            codec = create_codec(codec_name)
            back = decoded(codec, encoded(codec, page, page_key(kind)), page)
            error = (back.float() - page.float()).norm() / page.float().norm()
            assert error < limit, (name, codec_name, float(error))
