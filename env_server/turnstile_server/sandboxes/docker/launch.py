"""One sandbox's container on its way: created with the server's files in it, started, its helper connected.

Two transports, chosen per server (``transport.py``): over Unix sockets in a folder of the server's that the
container has mounted, or over the container's standard input and output. The caller removes the container and
closes ``link`` where anything fails.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import anyio

from turnstile_server.errors import SandboxDeath, SandboxUnavailable, TaskFailed, TurnstileError
from turnstile_server.runtimes.layout import PYTHON, TARGET
from turnstile_server.runtimes.store import CarriedRuntime
from turnstile_server.sandboxes.background import BackgroundTasks
from turnstile_server.sandboxes.docker import containers
from turnstile_server.sandboxes.docker.engine import DockerEngine
from turnstile_server.sandboxes.docker.inspected import Image
from turnstile_server.sandboxes.docker.server_files import ServerFiles
from turnstile_server.sandboxes.endpoint import AgentEndpoint
from turnstile_server.sandboxes.helper import HELPER_FOLDER, HELPER_TARGET
from turnstile_server.sandboxes.helper_client import HelperClient
from turnstile_server.sandboxes.link import SandboxLink
from turnstile_server.sandboxes.network import SandboxNetwork
from turnstile_server.sandboxes.protocol import IMAGE_PYTHON, SandboxSpec
from turnstile_server.sandboxes.sockets import SandboxSockets
from turnstile_server.sandboxes.stream_link import StreamLink
from turnstile_server.sandboxes.users import Uids
from turnstile_server.settings import SandboxSettings

_LOOK_S = 1.0
"""Seconds between looks at the container of a helper that has not called yet: it may have ended."""
_SETTLE_S = 0.1
_SETTLE_LOOKS = 50
"""The engine knows the end of a container a moment after its output has ended."""
_FILL_ROUNDS = 3
_HELPER = (HELPER_FOLDER, HELPER_TARGET)

Bodies = Callable[[Sequence[Mapping[str, Any]]], dict[str, Any]]
"""A container with these mounts, as a body of the Engine API."""


@dataclass(frozen=True, slots=True)
class NewSandbox:
    """The sandbox that a container is made for."""

    spec: SandboxSpec
    image: Image
    image_name: str
    container: str
    """Its name."""
    labels: Mapping[str, str]
    uids: Uids
    runtime: CarriedRuntime | None
    """None where the helper runs on the image's Python, or there is no helper."""

    @property
    def python(self) -> str:
        return IMAGE_PYTHON if self.runtime is None else PYTHON


class Launcher:
    """Creates containers. ``files``: how the server's folders get into them."""

    def __init__(self, engine: DockerEngine, files: ServerFiles, settings: SandboxSettings) -> None:
        self.engine = engine
        self.files = files
        self.settings = settings

    async def without_helper(self, new: NewSandbox, tasks: BackgroundTasks) -> None:
        """Starts a container that waits for commands. Raises TaskFailed, SandboxUnavailable."""

        def body(mounts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
            most = self.settings.open_files
            return containers.without_helper(new.spec, new.image, new.uids, new.labels, mounts, most)

        await self.create(new, body, tasks, helper=False)
        await self.engine.start(new.container, image_name=new.image_name)

    async def create(self, new: NewSandbox, body: Bodies, tasks: BackgroundTasks, *, helper: bool = True) -> None:
        """Creates the container with its files, the helper among them. A volume that was removed meanwhile is
        filled again. Raises TaskFailed, SandboxUnavailable."""
        wanted = [(mount.source, mount.target) for mount in new.spec.mounts]
        if helper:
            wanted.append(_HELPER)
        if new.runtime is not None:
            wanted.append((new.runtime.folder, TARGET))
        for _ in range(_FILL_ROUNDS):
            mounts = await self.files.mounts(wanted, new.image, new.image_name, tasks)
            bodies = [mount.body for mount in mounts]
            await self.engine.create(new.container, body(bodies), image_name=new.image_name)
            if await self.files.intact(mounts):
                return
            await self.engine.remove(new.container)
        raise SandboxUnavailable("the engine's volumes with the server's files are removed again and again")

    async def early_end(self, new: NewSandbox, said: str | None = None) -> TurnstileError | None:
        """The failure of a container that has ended: its image's, unless something outside ended it. None while it
        runs. ``said``: what its helper wrote to standard error; None asks the engine."""
        state = await self.engine.state(new.container)
        if state is None:
            return SandboxUnavailable(f"a new container of {new.image_name} was removed from outside")
        if state.running:
            return None
        output = state.error or (await self.engine.log(new.container) if said is None else said)
        ended = f"in a container of {new.image_name} (exit code {state.exit_code}): {output}"
        if state.death is SandboxDeath.OUTSIDE:
            return SandboxUnavailable(f"the helper was ended from outside {ended}")
        return TaskFailed(f"the helper ended {ended}")


class Launch(Protocol):
    """One sandbox being launched."""

    @property
    def link(self) -> SandboxLink: ...

    async def run(self) -> HelperClient:
        """Creates and starts the container; returns when its helper is connected. Raises TaskFailed, with the
        helper's last output where it ended too early, and SandboxUnavailable."""
        ...


class SocketLaunch:
    """A ``Launch`` over sockets in ``folder``, which the container has mounted."""

    def __init__(
        self,
        launcher: Launcher,
        new: NewSandbox,
        folder: Path,
        agents: AgentEndpoint,
        tasks: BackgroundTasks,
        network: SandboxNetwork | None,
    ) -> None:
        self.link = SandboxSockets(folder, agents, tasks, name=folder.name, network=network)
        self._launcher = launcher
        self._new = new
        self._tasks = tasks

    async def run(self) -> HelperClient:
        launcher, new, link = self._launcher, self._new, self.link

        def body(mounts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
            environment, folder = link.environment, str(link.folder)
            return containers.dialing(
                new.spec, new.image, new.uids, new.labels, mounts, new.python, environment, folder
            )

        await link.open()
        await launcher.create(new, body, self._tasks)
        await launcher.engine.start(new.container, image_name=new.image_name)
        return await _unless(partial(link.dialed_in, launcher.settings.start_timeout_s), self._early_end)

    async def _early_end(self) -> TurnstileError:
        """Waits for the end of a container whose helper has not called: why it ended."""
        while True:
            await anyio.sleep(_LOOK_S)
            try:
                ended = await self._launcher.early_end(self._new)
            except SandboxUnavailable as error:
                return error
            if ended is not None:
                return ended


class StreamLaunch:
    """A ``Launch`` over the container's standard input and output. ``folder``: the server's own, for the
    listener."""

    def __init__(
        self,
        launcher: Launcher,
        new: NewSandbox,
        folder: Path,
        agents: AgentEndpoint,
        tasks: BackgroundTasks,
        network: SandboxNetwork | None,
    ) -> None:
        most = launcher.settings.max_connections
        self.link = StreamLink(folder, agents, tasks, name=folder.name, max_connections=most, network=network)
        self._launcher = launcher
        self._new = new
        self._tasks = tasks

    async def run(self) -> HelperClient:
        launcher, new, link = self._launcher, self._new, self.link

        def body(mounts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
            return containers.attached(new.spec, new.image, new.uids, new.labels, mounts, new.python)

        await link.open()
        await launcher.create(new, body, self._tasks)
        stream = await launcher.engine.attach(new.container)
        link.take_stream(stream)
        await launcher.engine.start(new.container, image_name=new.image_name)
        try:
            return await link.greeted(launcher.settings.start_timeout_s)
        except SandboxUnavailable as error:
            raise await self._early_end(stream.errors) or error from error

    async def _early_end(self, said: str) -> TurnstileError | None:
        """The failure of a container that has ended; None where it still runs a while after its output ended."""
        for _ in range(_SETTLE_LOOKS):
            ended = await self._launcher.early_end(self._new, said)
            if ended is not None:
                return ended
            await anyio.sleep(_SETTLE_S)
        return None


async def _unless(
    connected: Callable[[], Awaitable[HelperClient]], ended: Callable[[], Awaitable[TurnstileError]]
) -> HelperClient:
    """Waits for the helper's call. Raises SandboxUnavailable, and the other's error where that comes first."""
    client: HelperClient | None = None
    failure: TurnstileError | None = None
    async with anyio.create_task_group() as racing:

        async def watch() -> None:
            nonlocal failure
            failure = await ended()
            racing.cancel_scope.cancel()

        racing.start_soon(watch)
        try:
            client = await connected()
        except SandboxUnavailable as error:  # raised below: the group would wrap it
            failure = error
        racing.cancel_scope.cancel()
    if client is not None:
        return client
    raise failure or SandboxUnavailable("the sandbox's helper did not call")
