"""Sandboxes as environments of Harbor: a ``StreamBackend`` whose helpers dial the server.

Harbor's ``exec`` has no standard input and gives its output at the end, so it cannot be the stream; its ssh is had
for six providers, installs an sshd from the network into every environment, and docker's refuses a shut network.
So all are dialled from inside (``sandboxes/dial_out``): the one way needs ``exec``, ``upload_file`` and a way to
one address.

Owns every environment that it made, each with a folder of its own below the run folder: what Harbor writes, and
the record by which the next start asks the provider to remove what a killed server left.
"""

from __future__ import annotations

import logging
import re
import shutil
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final, TypeVar

import anyio
import anyio.to_thread

from turnstile_server.errors import SandboxDeath, SandboxUnavailable, StartupError, TaskFailed, TurnstileError
from turnstile_server.runtimes.layout import PYTHON, TARGET
from turnstile_server.sandboxes.background import BackgroundTask, BackgroundTasks
from turnstile_server.sandboxes.choose_python import NO_RUNTIME, choose_python
from turnstile_server.sandboxes.dial_out.dialled_stream import DialledStream
from turnstile_server.sandboxes.dial_out.listener import ExpectedHelper, LinkAddress, LinkBounds, LinkListener
from turnstile_server.sandboxes.docker import containers
from turnstile_server.sandboxes.harbor.environments import HarborKind, ProvidedEnvironment, said
from turnstile_server.sandboxes.harbor.host_files import (
    UPLOADED,
    DialOrder,
    HostFiles,
    look_command,
    start_command,
)
from turnstile_server.sandboxes.helper import HELPER_FOLDER, HELPER_TARGET
from turnstile_server.sandboxes.helper.turnstile_helper import frames
from turnstile_server.sandboxes.helper_sandbox import HelperSandbox, Layout
from turnstile_server.sandboxes.host_layout import check_workdir, host_layout
from turnstile_server.sandboxes.protocol import (
    IMAGE_PYTHON,
    Command,
    ImageFacts,
    ProviderSetup,
    SandboxLimits,
    SandboxSpec,
)
from turnstile_server.sandboxes.reached import reached_from
from turnstile_server.sandboxes.stream_provider import HostEnd, HostFacts, StreamProvider
from turnstile_server.sandboxes.users import Uids, UidSets, range_is_mapped
from turnstile_server.settings import Bounds

T = TypeVar("T")
log = logging.getLogger(__name__)

KIND: Final = "harbor:"
OUTSIDE: Final = ("1.1.1.1:443", "8.8.8.8:53", "2606:4700:4700::1111:443", "pypi.org:443", "169.254.169.254:80")
"""What a sandbox tries to reach at start: the Internet by address and by name, and the metadata of clouds."""
_LIMITS: Final = SandboxLimits(memory_bytes=512 << 20, cpus=1.0, pids=64, disk_bytes=16 << 20)
_LOOK_S: Final = 8
_PID: Final = re.compile(r"^pid (\d+)$", re.MULTILINE)
_MAPS: Final = ("/proc/self/uid_map", "/proc/self/gid_map")


@dataclass(frozen=True)
class HarborBounds(Bounds):
    """Bounds that nobody has asked to change, in seconds."""

    provide_s: float = 600.0
    """For a provider to start an environment, with an image that it does not have yet."""
    send_s: float = 600.0
    """For the server's files to go there."""
    dial_s: float = 60.0
    """For the helper to unpack them and to dial."""
    remove_s: float = 120.0
    """For an environment to be removed."""


class HarborHost:
    """A ``HelperHost``: one environment, whose helper has dialled the server."""

    warm = False

    def __init__(
        self,
        environment: ProvidedEnvironment,
        pid: int,
        stream: DialledStream,
        layout: Callable[[HostFacts], Layout],
        release: Callable[[], Awaitable[None]],
    ) -> None:
        self.stream = stream
        self.layout = layout
        self._environment = environment
        self._pid = pid
        self._release = release

    async def died(self) -> HostEnd:
        outside = SandboxDeath.OUTSIDE
        try:
            done = await self._environment.exec(look_command(self._pid), timeout_sec=_LOOK_S, user="root")
        except Exception as error:  # noqa: BLE001 - of whichever library
            return HostEnd(outside, f"its environment does not answer any more ({said(error)})")
        found = " ".join((done.stdout or "").split())[-200:]
        if done.return_code != 0:
            return HostEnd(outside, f"its environment does not answer any more ({found or done.return_code})")
        if found == "gone":
            return HostEnd(SandboxDeath.INSIDE, "its helper was killed, by nothing that its provider tells of")
        if found == "runs" and not self.stream.ended:
            return HostEnd(SandboxDeath.INSIDE, "its environment runs, and its helper says nothing")
        return HostEnd(outside, "its link to the server was cut, and no link is made again")

    async def destroy(self) -> None:
        await self._release()


class HarborBackend:
    """A ``StreamBackend``. ``kind`` None: of Harbor, what the settings name. ``outside``: what a shut network does
    not reach."""

    def __init__(
        self, setup: ProviderSetup, kind: HarborKind | None = None, *, outside: Sequence[str] = OUTSIDE
    ) -> None:
        settings = setup.settings
        self.name = settings.kind
        self._settings = settings
        self._kind = kind or HarborKind(settings.kind.removeprefix(KIND), settings.harbor_options)
        self._bounds = settings.bounds_of(HarborBounds)
        self._runtimes = setup.runtimes
        self._outside = outside
        self._folder = setup.run_dir / "harbor"
        self._files = HostFiles(self._folder)
        self._listener: LinkListener | None = None
        self._tasks: BackgroundTasks | None = None
        self._carried = NO_RUNTIME
        self._uids = UidSets(settings, from_range=False)
        self._reachable: str | None = None
        self._found = "not started"
        self._open = False
        self._undoing: set[BackgroundTask[None]] = set()

    @property
    def isolated(self) -> bool:
        return not self._open

    @property
    def description(self) -> str:
        return f"{self.name}: {self._found}"

    @property
    def carries_runtime(self) -> bool:
        return self._carried.runtime is not None

    async def image_facts(self, image: str | None) -> ImageFacts | None:
        return None  # Harbor tells none

    async def start(self, tasks: BackgroundTasks, make: Callable[[SandboxSpec], Awaitable[HelperSandbox]]) -> None:
        if self._settings.link_address is None:
            raise StartupError(
                f"sandboxes.kind = {self.name} needs sandboxes.link_address: HOST:PORT at which its environments "
                "reach this server"
            )
        address = LinkAddress.parse(self._settings.link_address)
        await anyio.to_thread.run_sync(self._kind.load)
        await anyio.to_thread.run_sync(partial(self._folder.mkdir, mode=0o700, exist_ok=True))
        self._tasks = tasks
        self._listener = LinkListener(address, self._settings.bounds_of(LinkBounds), self._folder)
        await self._listener.start(tasks)
        await self._sweep()
        self._reachable = await self._host_to_leave_open(address.host)
        self._carried = await choose_python(self._settings.docker_python, self._runtimes)
        try:
            sandbox = await make(SandboxSpec(_LIMITS))
            try:
                await self._try_out(sandbox, f"{address.host}:{address.port}")
            finally:
                with anyio.CancelScope(shield=True):
                    await sandbox.destroy()
        except StartupError:
            raise
        except TurnstileError as error:
            raise StartupError(f"sandboxes of {self.name} are not possible: {error.message}") from error

    async def create(self, sandbox_id: str, spec: SandboxSpec) -> HarborHost:
        check_workdir(spec)
        listener, tasks = self._listener, self._tasks
        if listener is None or tasks is None:
            raise SandboxUnavailable("the sandbox provider is not started, or closed")
        session, bounds = containers.name(sandbox_id), self._bounds
        folder = self._folder / session
        image = spec.image or self._settings.docker_image
        environment: ProvidedEnvironment | None = None
        expected: ExpectedHelper | None = None
        uids = self._uids.take()
        try:
            environment = await self._made(session, folder, image, spec.limits)
            release = partial(self._release, environment, folder, uids)
            await self._within(bounds.provide_s, "start", environment.start(force_build=False))
            address, expected = listener.address, listener.expect(bounds.send_s + 2 * bounds.dial_s)
            order = DialOrder(address.host, address.port, listener.sha256, expected.token, bounds.dial_s)
            await self._send(environment, spec, order, folder / "files.tgz")
            pid = await self._begun(environment, spec)
            stream = await expected.stream()
        except BaseException:
            undo = partial(self._release, environment, folder, uids)
            undoing = tasks.start(undo, name=f"undo {session}")
            self._undoing = {each for each in self._undoing if not each.ended.is_set()} | {undoing}
            with anyio.CancelScope(shield=True):
                if expected is not None:
                    await expected.close()
                await undoing.wait()
            raise
        return HarborHost(environment, pid, stream, partial(self._layout, spec, uids, image), release)

    async def close(self) -> None:
        for undoing in list(self._undoing):
            await undoing.ended.wait()
        if self._listener is not None:
            await self._listener.close()
        # What could not be removed keeps its record for the next start.
        left = list(self._folder.glob("*/")) if self._folder.is_dir() else []
        await anyio.to_thread.run_sync(_forget, self._folder, bool(left))

    # Making.

    @property
    def _python(self) -> str:
        return IMAGE_PYTHON if self._carried.runtime is None else PYTHON

    async def _made(
        self, session: str, folder: Path, image: str, limits: SandboxLimits | None
    ) -> ProvidedEnvironment:
        def make() -> ProvidedEnvironment:
            folder.mkdir(mode=0o700, exist_ok=True)
            return self._kind.make(session, folder, image, limits, self._reachable)

        try:
            return await anyio.to_thread.run_sync(make)
        except Exception as error:
            raise SandboxUnavailable(f"{self.name} takes no environment like this: {said(error)}") from error

    async def _within(self, seconds: float, what: str, work: Awaitable[T]) -> T:
        """Raises SandboxUnavailable, whatever Harbor and its provider's library raise."""
        try:
            with anyio.fail_after(seconds):
                return await work
        except TimeoutError as error:
            raise SandboxUnavailable(f"{self.name} did not {what} within {seconds:g} s") from error
        except Exception as error:
            raise SandboxUnavailable(f"{self.name} did not {what}: {said(error)}") from error

    async def _send(
        self, environment: ProvidedEnvironment, spec: SandboxSpec, order: DialOrder, archive: Path
    ) -> None:
        runtime = self._carried.runtime
        carried = {} if runtime is None else {runtime.folder: TARGET}
        mounts = {each.source: each.target for each in spec.mounts}
        await self._files.archive({HELPER_FOLDER: HELPER_TARGET, **carried, **mounts}, order, archive)
        await self._within(
            self._bounds.send_s, "take the server's files", environment.upload_file(archive, UPLOADED)
        )
        await anyio.Path(archive).unlink()

    async def _begun(self, environment: ProvidedEnvironment, spec: SandboxSpec) -> int:
        """The helper's process id, once its link stands. Raises SandboxUnavailable, TaskFailed."""
        command = start_command(self._python, spec.folders)
        seconds = self._bounds.dial_s * 2
        work = environment.exec(command, timeout_sec=round(seconds), user="root")
        done = await self._within(seconds, "start the helper", work)
        output = f"{done.stdout or ''}\n{done.stderr or ''}".strip()
        if found := _PID.search(output):
            return int(found[1])
        last = output.rpartition("\n")[2][-500:]
        if done.return_code == frames.CONNECTION_LOST:
            raise SandboxUnavailable(f"a sandbox of {self.name} cannot dial the server: {last}")
        raise TaskFailed(f"the image cannot run the helper (exit code {done.return_code}): {last}")

    def _layout(self, spec: SandboxSpec, uids: Uids, image: str, facts: HostFacts) -> Layout:
        found = host_layout(spec, facts, uids, self._python, image)
        # Nothing bounds all files together: each has a bound. What its provider runs in there may not be killed.
        bounds = {**found.rlimits, "FSIZE": spec.limits.disk_bytes}
        return replace(found, rlimits=bounds, own_processes=False)

    # Checking and removing.

    async def _host_to_leave_open(self, host: str) -> str | None:
        """``host`` where Harbor can shut the network but for it."""
        self._reachable = host
        trial = self._folder / "trial"
        try:
            await self._made("turnstile-trial", trial, self._settings.docker_image, None)
        except SandboxUnavailable as error:
            log.info("%s cannot shut the network but for %s: %s", self.name, host, error)
            return None
        finally:
            await anyio.to_thread.run_sync(partial(shutil.rmtree, trial, ignore_errors=True))
        return host

    async def _try_out(self, sandbox: HelperSandbox, link: str) -> None:
        """``link``: what a sandbox must reach, or the trial shows nothing."""
        maps = [await sandbox.exec(Command(("cat", each), timeout_s=_LOOK_S)) for each in _MAPS]
        mapped = range_is_mapped(self._settings, *(each.stdout.decode() for each in maps))
        self._uids = UidSets(self._settings, from_range=mapped)
        users = "a uid for each user" if sandbox.own_uids else "users NOT kept apart: the helper is not root there"
        reached = await reached_from(sandbox, (link, *self._outside), self._settings.call_timeout_s)
        if link not in reached:
            raise StartupError(
                f"a sandbox of {self.name} does not reach {link} a second time, so it cannot be tried whether its "
                "network is shut"
            )
        reached.remove(link)
        if reached and not self._settings.allow_unisolated:
            raise StartupError(
                f"the network of {self.name} is open: a sandbox reached {', '.join(reached)}. Have the "
                "provider shut it but for sandboxes.link_address (sandboxes.harbor_options), or let agents have "
                "it (sandboxes.allow_unisolated, for development)"
            )
        self._open = bool(reached)
        network = f"network OPEN ({', '.join(reached)})" if reached else "network shut but for the link"
        parts = (
            network,
            users,
            self._kind.limits,
            "disk: the provider's, each file bounded",
            self._carried.description,
        )
        self._found = "; ".join(parts)

    async def _sweep(self) -> None:
        """Asks the provider to remove what an earlier server of the same data directory left."""
        for folder in sorted(self._folder.glob("*/")):
            log.info("%s: removing the environment %s of an earlier server", self.name, folder.name)
            environment = None
            try:
                environment = await self._made(folder.name, folder, self._settings.docker_image, None)
            except SandboxUnavailable as error:
                log.warning("%s may be left at its provider: %s", folder.name, error)
            await self._release(environment, folder, None)

    async def _release(self, environment: ProvidedEnvironment | None, folder: Path, uids: Uids | None) -> None:
        """Never raises."""
        removed = True
        if environment is not None:
            try:
                await self._within(self._bounds.remove_s, "remove an environment", environment.stop(delete=True))
            except SandboxUnavailable as error:
                removed = False
                log.warning("the environment %s may be left at its provider: %s", folder.name, error)
        if removed:
            await anyio.to_thread.run_sync(partial(shutil.rmtree, folder, ignore_errors=True))
        if uids is not None:
            self._uids.give_back(uids)


def _forget(folder: Path, left: bool) -> None:
    for archive in folder.glob("*.tgz"):
        archive.unlink(missing_ok=True)
    if not left:
        shutil.rmtree(folder, ignore_errors=True)


def create(setup: ProviderSetup) -> StreamProvider:
    """The backend that ``sandboxes.kind = harbor:NAME`` names. Raises StartupError where no name follows."""
    if not setup.settings.kind.removeprefix(KIND.rstrip(":")).removeprefix(":"):
        raise StartupError(
            "sandboxes.kind = harbor:NAME names one of Harbor's environments: harbor:docker, harbor:modal, …"
        )
    return StreamProvider(HarborBackend(setup), setup)
