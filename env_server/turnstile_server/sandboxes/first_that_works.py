"""The backend ``auto``: the first of several that works on this machine."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from turnstile_server.errors import StartupError
from turnstile_server.sandboxes.background import BackgroundTasks
from turnstile_server.sandboxes.docker.provider import DockerProvider
from turnstile_server.sandboxes.endpoint import AgentEndpoint
from turnstile_server.sandboxes.local.provider import LocalProvider
from turnstile_server.sandboxes.no_sandboxes import NoSandboxes
from turnstile_server.sandboxes.protocol import ProviderSetup, Sandbox, SandboxProvider, SandboxSpec
from turnstile_server.sandboxes.run_folder import RunFolderUnusable
from turnstile_server.sandboxes.wrapper import ProviderWrapper


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


def create(setup: ProviderSetup) -> SandboxProvider:
    """Docker with its default image, then bubblewrap, then Docker without: an engine that lacks the image of tasks
    that name none could serve none of them, where bubblewrap can."""
    return FirstThatWorks(
        [
            lambda: DockerProvider.from_setup(setup, needs_image=True),
            lambda: LocalProvider.from_setup(setup),
            lambda: DockerProvider.from_setup(setup),
        ]
    )
