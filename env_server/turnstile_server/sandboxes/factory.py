"""The sandboxes that the settings ask for: one provider, whichever backend is behind it.

Making it touches nothing; its ``start`` tries what the machine has. Where that is nothing, the server still serves
episodes that need no sandbox, and ``create`` says what to install or set.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path

from starlette.types import ASGIApp

from turnstile_server.errors import SandboxUnavailable, StartupError
from turnstile_server.sandboxes.docker.provider import DockerProvider
from turnstile_server.sandboxes.local.provider import LocalProvider
from turnstile_server.sandboxes.pool import SandboxPool
from turnstile_server.sandboxes.protocol import Sandbox, SandboxProvider, SandboxSpec
from turnstile_server.settings import SandboxSettings

log = logging.getLogger(__name__)

_SWITCHED_OFF = "this server has no sandboxes (sandboxes.kind = none); choose auto, docker or local"


def create_provider(
    settings: SandboxSettings,
    run_dir: Path,
    owner: str,
    *,
    idle_connection_s: float = 75.0,
    hidden: Sequence[Path] = (),
) -> SandboxProvider:
    """``run_dir``: this server's own folder for sockets, short, the same at every start on one data directory.
    ``owner``: names that data directory to the Docker engine. ``hidden``: what no sandbox may show of the host, as
    LocalProvider takes it (containers show nothing of it). ``start`` raises StartupError where a kind was asked
    for by name and does not work; with ``auto`` and ``none`` it does not."""

    def docker(needs_image: bool = False) -> DockerProvider:
        return DockerProvider(
            settings, run_dir, owner, idle_connection_s=idle_connection_s, needs_image=needs_image
        )

    def local() -> LocalProvider:
        return LocalProvider(settings, run_dir, idle_connection_s=idle_connection_s, hidden=hidden)

    match settings.kind:
        case "docker":
            provider: SandboxProvider = docker()
        case "local":
            provider = local()
        case "auto":
            # An engine without the image of tasks that name none serves none of them, where bubblewrap would.
            provider = FirstThatWorks([lambda: docker(needs_image=True), local, docker])
        case "none":
            provider = NoSandboxes(_SWITCHED_OFF)
    return SandboxPool(provider, settings)


class NoSandboxes:
    name = "none"
    isolated = True

    def __init__(self, reason: str) -> None:
        self.missing: str | None = reason
        self._reason = reason

    async def start(self, agent_door: ASGIApp) -> None:
        """There is nothing to start."""

    async def create(self, spec: SandboxSpec) -> Sandbox:
        raise SandboxUnavailable(self._reason)

    async def close(self) -> None:
        """There is nothing to close."""


class FirstThatWorks:
    """The first of several providers whose ``start`` raises nothing, from then on; NoSandboxes if all do."""

    def __init__(self, candidates: Sequence[Callable[[], SandboxProvider]]) -> None:
        self._candidates = candidates
        self._chosen: SandboxProvider = NoSandboxes("the sandbox provider is not started")

    @property
    def name(self) -> str:
        return self._chosen.name

    @property
    def isolated(self) -> bool:
        return self._chosen.isolated

    @property
    def missing(self) -> str | None:
        return self._chosen.missing

    async def start(self, agent_door: ASGIApp) -> None:
        problems: list[str] = []
        for candidate in self._candidates:
            provider = candidate()
            try:
                await provider.start(agent_door)
            except StartupError as error:
                await provider.close()
                if error.message not in problems:
                    problems.append(error.message)
            except BaseException:
                await provider.close()
                raise
            else:
                self._chosen = provider
                return
        reason = "no sandbox can be made on this machine: " + "; ".join(problems)
        log.warning("episodes that need a sandbox will be refused: %s", reason)
        self._chosen = NoSandboxes(reason)

    async def create(self, spec: SandboxSpec) -> Sandbox:
        return await self._chosen.create(spec)

    async def close(self) -> None:
        await self._chosen.close()
