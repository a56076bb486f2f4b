"""What codecs cost a gradient: nothing for the lossless ones, little and told layer by layer for the lossy ones."""

from __future__ import annotations

import pytest
import torch
from model_zoo import build

from tiercache.errors import ConfigError
from tiercache.runtime.codec_parity import codec_parity, layer_of


@pytest.fixture(scope="module")
def model():
    return build("llama", dtype=torch.bfloat16)


@pytest.mark.parametrize("codec", ["exponent", "window", "auto", "zstd"])
def test_lossless_codecs_change_nothing(model, codec):
    report = codec_parity(model, codec)
    assert report.passed
    assert report.gradient_error == report.logprob_error == 0.0
    assert report.moved_bytes > 0


def test_lossy_codecs_say_what_they_cost_layer_by_layer(model):
    int8, int4 = codec_parity(model, "int8"), codec_parity(model, "int4")
    assert 0 < int8.gradient_error < 0.1
    assert int8.gradient_error < int4.gradient_error < 1.0
    assert len([name for name in int8.layers if ".layers." in name]) == model.config.num_hidden_layers
    assert all(error >= 0 for error in int8.layers.values())
    assert set(int8.as_dict()) >= {"codec", "layers", "gradient_error", "logprob_error", "passed"}


def test_unknown_codecs_are_refused(model):
    with pytest.raises(ConfigError, match="unknown codec"):
        codec_parity(model, "gzip")


@pytest.mark.parametrize(
    ("name", "layer"),
    [
        ("model.layers.3.mlp.up.weight", "model.layers.3"),
        ("model.norm.weight", "model.norm"),
        ("head", "head"),
    ],
)
def test_parameters_belong_to_their_layer(name, layer):
    assert layer_of(name) == layer
