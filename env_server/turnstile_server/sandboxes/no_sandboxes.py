"""The backend ``none``, which refuses every sandbox; also what stands where no backend works."""

from __future__ import annotations

from turnstile.plugins import Plugins
from turnstile_server.errors import SandboxUnavailable
from turnstile_server.sandboxes.background import BackgroundTasks
from turnstile_server.sandboxes.endpoint import AgentEndpoint
from turnstile_server.sandboxes.protocol import ImageFacts, ProviderSetup, Sandbox, SandboxProvider, SandboxSpec


class NoSandboxes:
    """A ``SandboxProvider`` that refuses every sandbox with ``reason``."""

    name = "none"
    isolated = True
    carries_runtime = False

    def __init__(self, reason: str) -> None:
        self.missing: str | None = reason
        self.description = f"none: {reason}"
        self._reason = reason

    async def start(self, agents: AgentEndpoint, tasks: BackgroundTasks) -> None:
        """There is nothing to start."""

    async def create(self, spec: SandboxSpec) -> Sandbox:
        raise SandboxUnavailable(self._reason)

    async def image_facts(self, image: str | None) -> ImageFacts | None:
        return None

    async def close(self) -> None:
        """There is nothing to close."""


def create(setup: ProviderSetup) -> SandboxProvider:
    """The backend that ``sandboxes.kind = none`` names."""
    names = Plugins("turnstile.sandboxes").names()
    *others, last = [name for name in names if name != setup.settings.kind]
    choice = f"{', '.join(others)} or {last}"
    return NoSandboxes(f"this server has no sandboxes (sandboxes.kind = none); choose {choice}")
