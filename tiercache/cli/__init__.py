"""The command line. Each command is a module, imported when it is asked for; it may import every room."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from tiercache.errors import TierCacheError

# name -> module below this package. A module offers `app` (typer.Typer: one command, or a group) and
# imports what is heavy inside its functions: `tiercache --help` imports every one of them.
COMMANDS = {
    "demo": "demo_command",
    "profile": "profile_command",
    "top": "top_command",
    "plan": "plan_command",
    "tune": "tune_command",
    "simulate": "simulate_command",
    "store": "store_command",
    "verify": "verify_command",
    "report": "report_command",
}

# Some versions of typer carry a click of their own, so its classes are reached through typer.
_USAGE_ERROR: type[Exception] = typer.BadParameter.__mro__[1]
_CLICK_ERROR: type[Exception] = typer.BadParameter.__mro__[2]


class LazyGroup(TyperGroup):
    """A group whose commands come from COMMANDS; a command that this installation lacks is not listed."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Names in the order of the table."""
        return [name for name, module in COMMANDS.items() if importlib.util.find_spec(f"{__name__}.{module}")]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """The command, imported now; None when there is none."""
        if cmd_name not in self.list_commands(ctx):
            return None
        module = importlib.import_module(f"{__name__}.{COMMANDS[cmd_name]}")
        command = typer.main.get_command(module.app)
        command.name = cmd_name
        # the shell completes `tiercache`, not its commands; and every command is helped the same way
        command.params = [
            p for p in command.params if p.name not in ("install_completion", "show_completion")
        ]
        command.context_settings.setdefault("help_option_names", ["-h", "--help"])
        return command


app = typer.Typer(
    cls=LazyGroup,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(importlib.metadata.version("tiercache"))
        raise typer.Exit


@app.callback(invoke_without_command=True)
def tiercache(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Train many branches of one long prompt with the gradient of dense training, on little memory."""
    if context.invoked_subcommand is None and not version:
        typer.echo(context.get_help())


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status.

    A wrong argument, and every error of tiercache's own, is one line on stderr and status 2; anything else is
    a bug and keeps its traceback.
    """
    command: Any = typer.main.get_command(app)
    try:
        status = command.main(args=arguments, prog_name="tiercache", standalone_mode=False)
    except _USAGE_ERROR as error:
        path = getattr(getattr(error, "ctx", None), "command_path", "tiercache")
        return _fail(f"{error.format_message()} (see {path} --help)")  # type: ignore[attr-defined]
    except (_CLICK_ERROR, TierCacheError) as error:
        return _fail(str(error))
    except (typer.Abort, KeyboardInterrupt):
        return 130
    return status if isinstance(status, int) else 0


def _fail(message: str) -> int:
    typer.echo("tiercache: error: " + " ".join(message.split()), err=True)
    return 2
