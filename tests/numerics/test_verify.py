"""The parity ladder, in Python and from the command line."""

import json

import model_zoo
import pytest
import torch
from plain_model import build_plain

from tiercache.cli import main
from tiercache.errors import ConfigError, ModelRefusedError
from tiercache.runtime import parity, prefix_attention, verify
from tiercache.runtime.adapters.base import Router
from tiercache.runtime.parity import _pooled


def test_ladder_of_a_model_passes_rung_by_rung():
    model = model_zoo.build("gemma2", dtype=torch.bfloat16)
    before = {n: p.clone() for n, p in model.state_dict().items()}
    report = verify(model)
    assert [r.dtype for r in report.rungs] == ["float64", "float32", "bfloat16"]
    assert report.passed
    assert report.rungs[0].gradient_error < 5e-6
    assert report.rungs[2].dense_gradient_error > 1e-3
    assert all(p.grad is None for p in model.parameters())
    assert all(torch.equal(before[n], p) for n, p in model.state_dict().items())
    assert json.loads(json.dumps(report.as_dict()))["passed"] is True


def test_ladder_of_a_plain_model_reaches_rounding():
    told = []
    report = verify(build_plain(prefix_attention), progress=told.append)
    assert [r.dtype for r in report.rungs] == ["float64", "float32"]
    assert told[0] == "proof of the model"
    assert [line.split(":")[0] for line in told[1:]] == ["float64", "float64", "float32", "float32"]
    assert report.passed
    assert report.rungs[0].gradient_error < 1e-13


@pytest.mark.parametrize(("num_tokens", "sets"), [(256, 1), (700, 2), (4096, 4)])
def test_a_coarse_dtype_is_measured_on_as_many_texts_as_there_are(num_tokens, sets):
    told, tokens = [], torch.arange(num_tokens) * 7919
    report = verify(model_zoo.build("llama", dtype=torch.bfloat16), tokens=tokens, progress=told.append)
    assert report.passed
    more = [line for line in told if "further sets" in line]
    assert more == ([f"bfloat16: further sets of rows, against fp32: {sets - 1}"] if sets > 1 else [])


def test_pooled_errors_are_those_of_all_texts_together():
    squares = [torch.tensor([[1.0, 100.0], [4.0, 16.0]]), torch.tensor([[3.0, 300.0], [0.0, 48.0]])]
    assert _pooled(squares) == pytest.approx((0.1, 0.25))


def test_a_text_too_short_for_a_set_of_rows_is_refused():
    with pytest.raises(ConfigError, match="256"):
        verify(model_zoo.build("llama"), tokens=torch.arange(255))


def test_ladder_on_a_twin_names_what_was_run():
    report = verify(model_zoo.build("mistral"), whole_model=False)
    assert report.passed
    assert "twin of MistralForCausalLM, sliding_window 16 instead of 6" in report.rungs[0].subject


def test_experts_have_a_rung_in_fp64_one_by_one():
    model = model_zoo.build("mixtral")
    report = verify(model)
    assert report.passed, report.as_dict()
    assert not report.rungs[0].missing
    assert report.rungs[0].gradient_error < 1e-6
    assert model.config._experts_implementation != "eager"


def test_a_dtype_that_the_model_does_not_run_in_is_said(monkeypatch):
    def refuse(*_):
        raise RuntimeError("no product in Double\nbecause")

    monkeypatch.setattr(parity, "_dense", refuse)
    report = verify(build_plain(prefix_attention))
    assert [rung.missing for rung in report.rungs] == ["no product in Double"] * 2
    assert not report.passed


@pytest.mark.parametrize("name", ["lfm2", "falcon_h1", "qwen3_5", "youtu"])
def test_ladder_of_models_with_states_or_latents(name):
    report = verify(model_zoo.build(name))
    assert report.passed, report.as_dict()
    assert not any(rung.missing for rung in report.rungs)
    pages = report.pages
    assert (pages["prefix_bytes_per_token"] < pages["expanded_bytes_per_token"]) is (name == "youtu")
    assert (pages["state_bytes"] > 0) is (name != "youtu")


def test_a_wrong_gradient_fails_its_rung(monkeypatch):
    """Attention that is right forward, so that the proof passes, and loses a thousandth of what flows back."""
    attend = Router.attend

    def lossy(self, *args, **kwargs):
        out = attend(self, *args, **kwargs)
        return out * 0.999 + out.detach() * 0.001

    monkeypatch.setattr(Router, "attend", lossy)
    report = verify(model_zoo.build("llama"))
    assert not report.passed
    assert not report.rungs[0].passed
    assert report.rungs[0].logprob_error < 5e-6 < report.rungs[0].gradient_error


def test_refused_models_have_no_ladder():
    with pytest.raises(ModelRefusedError, match="BloomAttention"):
        verify(model_zoo.build("bloom"))


@pytest.mark.parametrize("name", ["deepseek_v32", "falcon_h1"])
def test_command_runs_a_twin_of_a_configuration_without_weights(name, tmp_path, capsys):
    _save_configuration(name, tmp_path)
    assert main(["verify", "--model", str(tmp_path)]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "pass" in printed
    assert f"a small random {type(model_zoo.build(name)).__name__}" in printed


def test_command_refuses_a_configuration_with_the_layer_and_the_reason(tmp_path, capsys):
    _save_configuration("pooled", tmp_path)
    assert main(["verify", "--model", str(tmp_path)]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "layers.1.self_attn.indexer (Qwen4ExpTextQSAIndexer): sparse selection of pools of keys" in said


def _save_configuration(name, folder):
    model = model_zoo.build(name)
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)


@pytest.fixture
def saved(tmp_path):
    model_zoo.build("llama", dtype=torch.float32).save_pretrained(tmp_path / "model")
    return str(tmp_path / "model")


def test_command_prints_the_ladder_and_writes_json(saved, tmp_path, capsys):
    assert main(["verify", "--model", saved, "--json", str(tmp_path / "out.json")]) == 0
    printed = capsys.readouterr().out
    assert "float64" in printed
    assert "pass" in printed
    assert "No tokenizer" in printed
    assert "states 0." in printed
    assert json.loads((tmp_path / "out.json").read_text())["passed"] is True


def test_command_ends_with_status_1_when_a_rung_fails(saved, monkeypatch, capsys):
    monkeypatch.setattr("tiercache.runtime.parity.FP64_LIMIT", 1e-12)
    assert main(["verify", "--model", saved]) == 1
    assert "FAIL" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [[], ["--model", "a", "--gguf", "b"]])
def test_command_wants_one_model(arguments, capsys):
    assert main(["verify", *arguments]) == 2
    assert "name one model" in capsys.readouterr().err


def test_command_says_what_it_could_not_load(tmp_path, capsys):
    assert main(["verify", "--model", str(tmp_path)]) == 2
    assert "tiercache: error: model" in capsys.readouterr().err
