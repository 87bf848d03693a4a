"""The sandbox backends, by the name that ``sandboxes.kind`` chooses them with.

A new backend is one module with a ``SandboxProvider`` and one line in ``PROVIDERS``. Building a provider touches
nothing; its ``start`` tries what the machine has. Where nothing works, the server still serves episodes that need
no sandbox, and ``create`` says what to install or to set.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from turnstile_server.errors import SandboxUnavailable, StartupError
from turnstile_server.sandboxes.background import BackgroundTasks
from turnstile_server.sandboxes.docker.provider import DockerProvider
from turnstile_server.sandboxes.endpoint import AgentEndpoint
from turnstile_server.sandboxes.local.provider import LocalProvider
from turnstile_server.sandboxes.pool import SandboxPool
from turnstile_server.sandboxes.protocol import ImageFacts, ProviderSetup, Sandbox, SandboxProvider, SandboxSpec
from turnstile_server.sandboxes.run_folder import RunFolderUnusable
from turnstile_server.sandboxes.wrapper import ProviderWrapper


def create_provider(setup: ProviderSetup) -> SandboxProvider:
    """The backend that ``sandboxes.kind`` names, in a pool. Raises StartupError for a name that is not registered.

    ``start`` of what it returns raises StartupError where a backend was named and does not work on this machine;
    with ``auto`` and ``none`` it does not.
    """
    kind = setup.settings.kind
    if kind not in PROVIDERS:
        raise StartupError(f"sandboxes.kind: there is no backend {kind!r}; choose one of {', '.join(PROVIDERS)}")
    return SandboxPool(PROVIDERS[kind](setup), setup.settings)


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


class FirstThatWorks(ProviderWrapper):
    """The first of several providers whose ``start`` raises no StartupError; NoSandboxes where all do."""

    def __init__(self, candidates: Sequence[Callable[[], SandboxProvider]]) -> None:
        super().__init__(NoSandboxes("the sandbox provider is not started"))
        self._candidates = candidates

    async def start(self, agents: AgentEndpoint, tasks: BackgroundTasks) -> None:
        problems: list[str] = []
        for candidate in self._candidates:
            provider = candidate()
            try:
                await provider.start(agents, tasks)
            except RunFolderUnusable:  # the next backend would need the same folder
                await provider.close()
                raise
            except StartupError as error:
                await provider.close()
                if error.message not in problems:
                    problems.append(error.message)
            except BaseException:
                await provider.close()
                raise
            else:
                self.inner = provider
                return
        # bubblewrap's problem comes before the engine's: to mend it takes less.
        self.inner = NoSandboxes("no sandbox can be made on this machine: " + "; ".join(reversed(problems)))

    async def create(self, spec: SandboxSpec) -> Sandbox:
        return await self.inner.create(spec)


def _auto(setup: ProviderSetup) -> SandboxProvider:
    """Docker with its default image, then bubblewrap, then Docker without: an engine that lacks the image of tasks
    that name none could serve none of them, where bubblewrap can."""
    return FirstThatWorks(
        [
            lambda: DockerProvider.from_setup(setup, needs_image=True),
            lambda: LocalProvider.from_setup(setup),
            lambda: DockerProvider.from_setup(setup),
        ]
    )


def _none(setup: ProviderSetup) -> SandboxProvider:
    *others, last = [name for name in PROVIDERS if name != "none"]
    choice = f"{', '.join(others)} or {last}"
    return NoSandboxes(f"this server has no sandboxes (sandboxes.kind = none); choose {choice}")


PROVIDERS: dict[str, Callable[[ProviderSetup], SandboxProvider]] = {
    "auto": _auto,
    "docker": DockerProvider.from_setup,
    "local": LocalProvider.from_setup,
    "none": _none,
}
"""Every value of ``sandboxes.kind``."""
