"""The command line's manners: one line for what the user did wrong, a traceback only for a bug."""

from __future__ import annotations

import importlib.metadata

import pytest
import typer

import tiercache.cli
from tiercache.errors import TierFullError


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert tiercache.cli.main(["--version"]) == 0
    assert capsys.readouterr().out.strip() == importlib.metadata.version("tiercache")


def test_no_arguments_print_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert tiercache.cli.main([]) == 0
    assert "Usage: tiercache" in capsys.readouterr().out


def test_every_listed_command_has_a_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert tiercache.cli.main(["--help"]) == 0
    listed = [name for name in tiercache.cli.COMMANDS if f" {name} " in capsys.readouterr().out]
    for name in listed:
        assert tiercache.cli.main([name, "--help"]) == 0
        assert f"Usage: tiercache {name}" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [["no-such-command"], ["--no-such-option"]])
def test_a_wrong_argument_is_one_line_and_status_2(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert tiercache.cli.main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert captured.err.startswith("tiercache: error: No such")


def run_command(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> int:
    app = typer.Typer()

    @app.command()
    def fail() -> None:
        raise error

    module = type("module", (), {"app": app})
    monkeypatch.setattr(tiercache.cli.importlib, "import_module", lambda name: module)
    monkeypatch.setattr(tiercache.cli.importlib.util, "find_spec", lambda name: True)
    return tiercache.cli.main(["demo"])


def test_our_errors_are_one_line_and_status_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    error = TierFullError("put of a page", got="2 MiB", limit="1 MiB", remedy="raise the\nbudget")
    assert run_command(monkeypatch, error) == 2
    assert (
        capsys.readouterr().err
        == "tiercache: error: put of a page; got 2 MiB; limit 1 MiB. Raise the budget\n"
    )


def test_an_interrupt_is_status_130(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run_command(monkeypatch, KeyboardInterrupt()) == 130


def test_a_bug_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RuntimeError, match="a bug"):
        run_command(monkeypatch, RuntimeError("a bug"))
