"""`tiercache verify --codec`: what a page codec costs a model's gradient, layer by layer."""

from __future__ import annotations

import json

import pytest
import torch
from model_zoo import build

from tiercache.cli import main


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    build("llama", dtype=torch.bfloat16).save_pretrained(path)
    return str(path)


def test_the_command_reports_each_layers_error(saved, tmp_path, capsys):
    report = tmp_path / "out.json"
    assert main(["verify", "--model", saved, "--codec", "int8", "--json", str(report)]) == 0
    found = json.loads(report.read_text())["codec"]
    assert found["codec"] == "int8"
    assert not found["lossless"]
    assert found["passed"]
    assert found["moved_bytes"] > 0
    assert sum(".layers." in name for name in found["layers"]) >= 2
    assert 0 < found["gradient_error"] < 0.1
    printed = " ".join(capsys.readouterr().out.split())
    assert "Gradient with int8 against exact pages" in printed
    assert all(name in printed for name in found["layers"])


def test_an_unknown_codec_is_refused_by_name(saved, capsys):
    assert main(["verify", "--model", saved, "--codec", "gzip"]) == 2
    assert "unknown codec" in capsys.readouterr().err
