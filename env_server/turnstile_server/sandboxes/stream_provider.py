"""A provider over any backend that starts the helper somewhere and has a byte stream to it.

The backend makes *hosts*: pods, machines reached by ssh, whatever runs ``helper_command`` and gives its standard
input and output. Commands, files, model calls and the proxy of a sandbox go over that one stream, so a host needs
no network. The backend owns a host until it was destroyed; everything else of a sandbox, and that each host is
destroyed once, in any state, is this module's.
"""

from __future__ import annotations

import logging
import secrets
import shutil
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

import anyio
import anyio.to_thread
from anyio.abc import ByteStream

from turnstile_server.errors import SandboxDeath, SandboxFailed, SandboxUnavailable, TaskFailed, TurnstileError
from turnstile_server.sandboxes.background import BackgroundTask, BackgroundTasks
from turnstile_server.sandboxes.endpoint import AgentEndpoint
from turnstile_server.sandboxes.helper import HELPER_TARGET
from turnstile_server.sandboxes.helper_client import HelperClient
from turnstile_server.sandboxes.helper_sandbox import HelperSandbox, Layout
from turnstile_server.sandboxes.network import SandboxNetwork
from turnstile_server.sandboxes.protocol import ImageFacts, ProviderSetup, SandboxOrigin, SandboxSpec
from turnstile_server.sandboxes.run_folder import RunFolder, unusable
from turnstile_server.sandboxes.stream_link import StreamLink

log = logging.getLogger(__name__)

_PREFIX = "sb-"
_DIAGNOSIS_S = 10.0
"""For a backend to say what ended a host. One that does not answer by then is what failed."""


def helper_command(python: str, folder: str = HELPER_TARGET) -> tuple[str, ...]:
    """The command that a host runs, 3.8 or newer. ``folder``: where the host has ``helper.HELPER_FOLDER``."""
    return (python, "-I", "-S", "-B", folder)


@dataclass(frozen=True, slots=True)
class HostFacts:
    """What the helper found in its host."""

    workdir: str
    """The folder that it was started in: of a container, the image's."""
    environment: Mapping[str, str]
    machine: str
    """As uname(2) names it."""


@dataclass(frozen=True, slots=True)
class HostEnd:
    """The end of a host, and a sentence about it."""

    death: SandboxDeath
    why: str


class HelperHost(Protocol):
    """One place that runs the helper. Nothing else may have run in it."""

    @property
    def stream(self) -> ByteStream:
        """The helper's standard input and output, from now on the caller's to close. Closing it ends the helper,
        and with it all that runs in the host."""
        ...

    @property
    def warm(self) -> bool:
        """True if the host was there before it was asked for."""
        ...

    def layout(self, facts: HostFacts) -> Layout:
        """The layout that the helper gives the sandbox. Raises TaskFailed."""
        ...

    async def died(self) -> HostEnd:
        """Asked once, when the stream has ended or the helper says nothing: what ended the host, as seen from
        outside. Raises SandboxUnavailable."""
        ...

    async def destroy(self) -> None:
        """Releases everything. Called once; does not raise: what cannot be removed now is removed by ``close``,
        or by ``start`` of the next server with the same owner."""
        ...


class StreamBackend(Protocol):
    """Makes hosts. Its properties and ``image_facts`` are those of a ``SandboxProvider``."""

    @property
    def name(self) -> str: ...

    @property
    def isolated(self) -> bool: ...

    @property
    def description(self) -> str: ...

    @property
    def carries_runtime(self) -> bool: ...

    async def start(self, tasks: BackgroundTasks, make: Callable[[SandboxSpec], Awaitable[HelperSandbox]]) -> None:
        """Checks that it can work, and removes what an earlier server of the same owner left. ``make`` makes a
        sandbox, for what can only be tried from inside. Raises StartupError, SandboxUnavailable; ``close`` is
        still called."""
        ...

    async def create(self, sandbox_id: str, spec: SandboxSpec) -> HelperHost:
        """A new host. Raises SandboxUnavailable or TaskFailed (``SandboxProvider.create``); then, and where it is
        cancelled, it sees to it that nothing is left."""
        ...

    async def image_facts(self, image: str | None) -> ImageFacts | None: ...

    async def close(self) -> None:
        """Removes what is left, and releases what ``start`` took. May be called without ``start``."""
        ...


class StreamProvider:
    """A ``SandboxProvider`` over ``backend``."""

    missing: str | None = None

    def __init__(self, backend: StreamBackend, setup: ProviderSetup) -> None:
        self.backend = backend
        self._settings = setup.settings
        self._egress = setup.egress
        self._folder = RunFolder(setup.run_dir)
        self._agents: AgentEndpoint | None = None
        self._tasks: BackgroundTasks | None = None
        self._open: dict[str, HelperSandbox] = {}
        self._undoing: set[BackgroundTask[None]] = set()
        """Creations that failed and are being undone."""

    @property
    def name(self) -> str:
        return self.backend.name

    @property
    def isolated(self) -> bool:
        return self.backend.isolated

    @property
    def description(self) -> str:
        return self.backend.description

    @property
    def carries_runtime(self) -> bool:
        return self.backend.carries_runtime

    async def image_facts(self, image: str | None) -> ImageFacts | None:
        return await self.backend.image_facts(image)

    async def start(self, agents: AgentEndpoint, tasks: BackgroundTasks) -> None:
        self._folder.take()
        try:
            await anyio.to_thread.run_sync(_clear, self._folder.path)
        except OSError as error:
            raise unusable(self._folder.path, error) from error
        self._agents, self._tasks = agents, tasks
        await self.backend.start(tasks, self.create)

    async def create(self, spec: SandboxSpec) -> HelperSandbox:
        agents, tasks = self._agents, self._tasks
        if agents is None or tasks is None:
            raise SandboxUnavailable("the sandbox provider is not started, or closed")
        for mount in spec.mounts:
            if not mount.source.is_dir():
                raise SandboxUnavailable(f"{mount.source}, which the sandbox mounts, is not a folder")
        sandbox_id = _PREFIX + secrets.token_hex(6)  # short: it is part of the sockets' paths
        network = SandboxNetwork.of(spec, self._egress, tasks, sandbox_id)
        folder, most = self._folder.path / sandbox_id, self._settings.max_connections
        link = StreamLink(folder, agents, tasks, name=sandbox_id, max_connections=most, network=network)
        host: HelperHost | None = None
        try:
            await link.open()
            host = await self.backend.create(sandbox_id, spec)
            sandbox = await self._opened(sandbox_id, host, link, tasks)
        except BaseException:
            await self._undo(sandbox_id, host, link, tasks)
            raise
        if self._agents is None:
            await sandbox.destroy()
            raise SandboxUnavailable("the sandbox provider was closed")
        return sandbox

    async def close(self) -> None:
        self._agents = None
        async with anyio.create_task_group() as ending:
            for sandbox in list(self._open.values()):
                ending.start_soon(_destroy, sandbox)
            for undoing in list(self._undoing):
                ending.start_soon(undoing.ended.wait)
        await self.backend.close()
        self._folder.give_back()

    async def _opened(
        self, sandbox_id: str, host: HelperHost, link: StreamLink, tasks: BackgroundTasks
    ) -> HelperSandbox:
        link.take_stream(host.stream)
        try:
            client = await link.greeted(self._settings.start_timeout_s)
        except SandboxUnavailable as error:
            raise await _early_end(host, error) from error
        layout = host.layout(await self._facts(client))
        release = partial(self._release, sandbox_id, host)
        diagnose = partial(_diagnose, sandbox_id, host, client)
        sandbox = HelperSandbox(sandbox_id, client, link, layout, self._settings, release, tasks, diagnose)
        sandbox.origin = SandboxOrigin(warm=host.warm)
        await sandbox.open()
        if self.isolated and not sandbox.filtered:
            raise TaskFailed(
                "the helper could not install the system call filter: its Python has no ctypes, or the machine is "
                "none that the filter knows"
            )
        self._open[sandbox_id] = sandbox
        return sandbox

    async def _facts(self, client: HelperClient) -> HostFacts:
        try:
            reply = await client.call({"op": "facts"}, timeout_s=self._settings.start_timeout_s)
            fields = reply.fields
            return HostFacts(str(fields["cwd"]), dict(fields["env"]), str(fields["machine"]))
        except (KeyError, SandboxFailed) as error:
            raise SandboxUnavailable(f"a sandbox's helper did not say where it runs: {error}") from error

    async def _release(self, sandbox_id: str, host: HelperHost) -> None:
        self._open.pop(sandbox_id, None)
        await host.destroy()

    async def _undo(
        self, sandbox_id: str, host: HelperHost | None, link: StreamLink, tasks: BackgroundTasks
    ) -> None:
        """In the background: a caller that is cancelled again may not leave half a sandbox."""

        async def undo() -> None:
            try:
                await link.close()
            finally:
                if host is not None:
                    await host.destroy()

        undoing = tasks.start(undo, name=f"undo {sandbox_id}")
        self._undoing = {each for each in self._undoing if not each.ended.is_set()} | {undoing}
        with anyio.CancelScope(shield=True):
            await undoing.wait()


async def _early_end(host: HelperHost, error: SandboxUnavailable) -> TurnstileError:
    """The failure of a host whose helper did not speak: its image's, unless something outside ended it."""
    end = await _end_of(host)
    kind = SandboxUnavailable if end.death is SandboxDeath.OUTSIDE else TaskFailed
    return kind(f"{error.message}: {end.why}")


async def _diagnose(sandbox_id: str, host: HelperHost, client: HelperClient) -> SandboxDeath:
    end = await _end_of(host)
    log.warning("a sandbox ended: %s", end.why, extra={"sandbox": sandbox_id})
    client.explain(end.why)
    return end.death


async def _end_of(host: HelperHost) -> HostEnd:
    try:
        with anyio.fail_after(_DIAGNOSIS_S):
            return await host.died()
    except (SandboxUnavailable, TimeoutError) as error:
        return HostEnd(SandboxDeath.OUTSIDE, str(error) or "its backend does not answer")


async def _destroy(sandbox: HelperSandbox) -> None:
    try:
        await sandbox.destroy()
    except Exception as error:  # noqa: BLE001 - the others are destroyed all the same
        log.warning("a sandbox could not be destroyed: %s", error)


def _clear(run_dir: Path) -> None:
    """Removes the folders that a killed server left."""
    for folder in run_dir.glob(f"{_PREFIX}*/"):
        shutil.rmtree(folder)
