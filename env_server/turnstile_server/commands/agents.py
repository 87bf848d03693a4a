"""``turnstile agents install``: agents installed before the first episode waits for them.

Exit codes: 0; 1 where one could not be installed; 2 where the settings or the specs cannot be used.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import anyio
import typer

from turnstile.visible import visible
from turnstile_server.agents.installer import Installer
from turnstile_server.agents.registry import load_registry
from turnstile_server.agents.spec import AgentSpec
from turnstile_server.commands.serve import nested, settings_of
from turnstile_server.errors import AgentNotInstalled, StartupError, Unprocessable
from turnstile_server.grading.programs import LAUNCH_CLIENT

FAILED = 1
USAGE = 2


def install(
    names: Annotated[list[str] | None, typer.Argument(help="Agents; none: all that there are.")] = None,
    agent_specs: Annotated[
        list[Path] | None, typer.Option("--agent-specs", help="Folder of further agent specs; may be repeated.")
    ] = None,
    config: Annotated[Path | None, typer.Option("--config", help="Settings file (TOML).")] = None,
) -> None:
    """Install agents into the folder that this machine's servers mount into sandboxes."""
    settings = settings_of(nested({"agents.specs": agent_specs or None}), config)
    try:
        registry = load_registry(settings.agents.specs)
        wanted = [registry.get(name) for name in names] if names else list(registry)
    except (StartupError, Unprocessable) as error:
        typer.echo(visible(f"turnstile: {error.message}", lines=True), err=True)
        raise typer.Exit(USAGE) from None
    if not anyio.run(_install, Installer(settings.agents, LAUNCH_CLIENT), wanted):
        raise typer.Exit(FAILED)


async def _install(installer: Installer, wanted: list[AgentSpec]) -> bool:
    done = True
    for spec in wanted:
        there = installer.installed(spec)
        try:
            await installer.install(spec)
        except AgentNotInstalled as error:
            typer.echo(visible(f"turnstile: {error.message}", lines=True), err=True)
            done = False
        else:
            how = "was installed before" if there else "is installed"
            place = installer.folder / installer.name_of(spec)
            typer.echo(visible(f"{spec.name} {spec.version} {how}: {place}"))
    return done
