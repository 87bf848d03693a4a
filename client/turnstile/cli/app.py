"""The command tree: the client's own commands, and those that installed packages add through the entry-point
group ``turnstile.commands``."""

from __future__ import annotations

from importlib.metadata import version
from typing import Annotated

import typer

from turnstile.cli.agents import app as agents
from turnstile.cli.audit import audit
from turnstile.cli.episodes import app as episodes
from turnstile.cli.plugins import Plugins
from turnstile.cli.run import run


class Commands(Plugins):
    entry_point_group = "turnstile.commands"


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


app.command("run")(run)
app.add_typer(agents, name="agents")
app.add_typer(episodes, name="episodes")
app.command("audit")(audit)
