"""``turnstile agents install``: agents installed before the first episode waits for them, and the runtime that
Docker sandboxes are given.

Agents are prepared for the sandboxes that the settings name: with ``auto``, for both kinds, where the runtime can
be made. Exit codes: 0; 1 where one could not be installed; 2 where the settings or the specs cannot be used.
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
from turnstile_server.backends import runtimes_of
from turnstile_server.commands.serve import nested, settings_of
from turnstile_server.errors import AgentNotInstalled, StartupError, Unprocessable
from turnstile_server.grading.programs import LAUNCH_CLIENT
from turnstile_server.runtimes.source import RuntimeNotMade
from turnstile_server.settings import Settings

FAILED = 1
USAGE = 2


def install(
    names: Annotated[
        list[str] | None, typer.Argument(help="Agents; none: all that there are, or with --runtime none.")
    ] = None,
    runtime: Annotated[
        bool, typer.Option("--runtime", help="Make the Python that Docker sandboxes are given.")
    ] = False,
    agent_specs: Annotated[
        list[str] | None,
        typer.Option("--agent-specs", help="Folder of further agent specs, or module:object; may be repeated."),
    ] = None,
    config: Annotated[Path | None, typer.Option("--config", help="Settings file (TOML).")] = None,
) -> None:
    """Install agents into the folder that this machine's servers mount into sandboxes."""
    settings = settings_of(nested({"agents.specs": agent_specs or None}), config)
    try:
        registry = load_registry(settings.agents.specs)
        wanted = [registry.get(name) for name in names or ()]
        if not names and not runtime:
            wanted = list(registry)
    except (StartupError, Unprocessable) as error:
        typer.echo(visible(f"turnstile: {error.message}", lines=True), err=True)
        raise typer.Exit(USAGE) from None
    if not anyio.run(_install, settings, wanted, runtime):
        raise typer.Exit(FAILED)


async def _install(settings: Settings, wanted: list[AgentSpec], runtime: bool) -> bool:
    done, carried = await _make_runtime(settings, asked=runtime)
    installer = Installer(settings.agents, LAUNCH_CLIENT)
    for spec in wanted:
        there = installer.installed(spec) and (not carried or installer.installed(spec, carried=True))
        try:
            await installer.install(spec)
            if carried:
                await installer.install(spec, carried=True)
        except AgentNotInstalled as error:
            typer.echo(visible(f"turnstile: {error.message}", lines=True), err=True)
            done = False
        else:
            how = "was installed before" if there else "is installed"
            place = installer.folder / installer.name_of(spec)
            typer.echo(visible(f"{spec.name} {spec.version} {how}: {place}"))
    return done


async def _make_runtime(settings: Settings, *, asked: bool) -> tuple[bool, bool]:
    """Make the runtime for containers. Returns two bools: all went well, and there is a runtime. A runtime that
    was not asked for is made only where sandboxes may have images. It is then no failure if it cannot be made,
    unless ``docker_python`` is ``carried``."""
    kinds = ("docker", "oci", "auto")
    wanted = settings.sandboxes.kind in kinds and settings.sandboxes.docker_python != "image"
    if not asked and not wanted:
        return True, False
    store = runtimes_of(settings)
    try:
        there = await store.installed()
        made = await store.get()
    except RuntimeNotMade as error:
        must = asked or settings.sandboxes.docker_python == "carried"
        typer.echo(visible(f"turnstile: {error.message}", lines=True), err=True)
        return not must, False
    how = "was made before" if there else "is made"
    typer.echo(visible(f"The runtime for containers, Python {made.version}, {how}: {made.folder}"))
    return True, True
