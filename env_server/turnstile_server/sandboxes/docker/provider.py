"""Sandboxes as Docker containers.

Owns every container and volume with its ``turnstile.owner`` label: those it made, and those that an earlier
server with the same data directory left. ``start`` removes the containers, and the volumes whose folder is gone.
What must hold: a call of ``create`` that fails or is cancelled, at any point, leaves no container, no folder and
no socket; nothing of the agent's runs before the helper has dialed in.
"""

from __future__ import annotations

import logging
import secrets
import shutil
from functools import partial
from pathlib import Path

import anyio
import anyio.to_thread

from turnstile_server.egress.proxy import EgressProxy
from turnstile_server.errors import SandboxDeath, SandboxUnavailable, StartupError, TaskFailed
from turnstile_server.runtimes.store import RuntimeStore
from turnstile_server.sandboxes.background import BackgroundTask, BackgroundTasks
from turnstile_server.sandboxes.choose_python import NO_RUNTIME, choose_python
from turnstile_server.sandboxes.docker import containers
from turnstile_server.sandboxes.docker.engine import DockerEngine
from turnstile_server.sandboxes.docker.fallback import ExecSandbox
from turnstile_server.sandboxes.docker.inspected import ContainerState
from turnstile_server.sandboxes.docker.launch import (
    Launch,
    Launcher,
    NewSandbox,
    SocketLaunch,
    StreamLaunch,
)
from turnstile_server.sandboxes.docker.probes import ImageProbes
from turnstile_server.sandboxes.docker.runtime import ContainerRuntime
from turnstile_server.sandboxes.docker.server_files import ServerFiles
from turnstile_server.sandboxes.docker.transport import BIND, STREAM, EngineTransport, not_possible
from turnstile_server.sandboxes.docker.volumes import VolumeBounds, Volumes
from turnstile_server.sandboxes.endpoint import AgentEndpoint
from turnstile_server.sandboxes.helper_sandbox import HelperSandbox
from turnstile_server.sandboxes.link import SandboxLink
from turnstile_server.sandboxes.network import SandboxNetwork
from turnstile_server.sandboxes.protocol import ImageFacts, ProviderSetup, Sandbox, SandboxSpec
from turnstile_server.sandboxes.run_folder import RunFolder, unusable
from turnstile_server.sandboxes.users import Uids, UidSets
from turnstile_server.settings import SandboxSettings

log = logging.getLogger(__name__)

_PREFIX = "sb-"
_DIAGNOSIS_S = 5.0
"""For the engine to say what ended a container. One that does not answer by then is what failed."""
_SETTLE_S = 0.1
_SETTLE_LOOKS = 20
"""A helper whose connection has ended exits a moment later, and the engine knows it after that."""
_REMOVE_AGAIN_S = (0.5, 2.0)
"""Pauses before a removal that the engine refused is tried again; a busy engine refuses some."""


class DockerProvider:
    """A ``SandboxProvider``.

    ``run_dir`` and ``owner``: see ``ProviderSetup``. ``needs_image``: ``start`` fails without the default image.
    ``known_images``: by image id whether its Python runs the helper, for providers that share the results.
    ``egress`` and ``ephemeral``: see ``ProviderSetup``. ``runtimes``: makes the runtime that sandboxes are given;
    None: all run on their images' Python.
    """

    name = "docker"
    isolated = True
    missing: str | None = None

    def __init__(
        self,
        settings: SandboxSettings,
        run_dir: Path,
        owner: str,
        *,
        needs_image: bool = False,
        known_images: dict[str, bool] | None = None,
        egress: EgressProxy | None = None,
        runtimes: RuntimeStore | None = None,
        ephemeral: bool = False,
    ) -> None:
        self._ephemeral = ephemeral
        self._settings = settings
        self._egress = egress
        self._uids = UidSets(settings, from_range=False)
        self._run_dir = run_dir
        self._folder = RunFolder(run_dir)
        self._owner = owner
        self._needs_image = needs_image
        self._engine = DockerEngine(settings, run_dir)
        self._version = ""
        self._limits = "memory, cpus and pids of each container"
        self._runtimes = runtimes
        self._carried = NO_RUNTIME
        self._runtime = ContainerRuntime(self._engine, settings, self._labels("kernel"))
        self._reached = ""
        self._volumes = Volumes(self._engine, owner, settings.bounds_of(VolumeBounds).docker_copy_timeout_s)
        wanted = settings.docker_transport
        files = ServerFiles(self._engine, self._volumes, owner, may_bind=wanted != STREAM, may_copy=wanted != BIND)
        self._transport = EngineTransport(self._engine, self._runtime, files, wanted, run_dir)
        self._launcher = Launcher(self._engine, files, settings)
        self._agents: AgentEndpoint | None = None
        self._open: dict[str, HelperSandbox | ExecSandbox] = {}
        self._probes = ImageProbes(
            self._engine, self._labels("probe"), self._remove, {} if known_images is None else known_images
        )
        self._tasks: BackgroundTasks | None = None
        self._undoing: set[BackgroundTask[None]] = set()
        """Creations that failed and are being undone."""
        self._left: set[str] = set()
        """Containers that the engine did not remove when it was asked to."""

    @property
    def description(self) -> str:
        users = "a uid for each user" + (" of each sandbox" if self._uids.own else "")
        return (
            f"docker: Docker {self._version}, runtime {self._runtime.description}, {self._reached}; "
            f"{self._carried.description}; {users}; limits: {self._limits}"
        )

    @classmethod
    def from_setup(cls, setup: ProviderSetup, *, needs_image: bool = False) -> DockerProvider:
        return cls(
            setup.settings,
            setup.run_dir,
            setup.owner,
            needs_image=needs_image,
            egress=setup.egress,
            runtimes=setup.runtimes,
            ephemeral=setup.ephemeral,
        )

    @property
    def carries_runtime(self) -> bool:
        return self._carried.runtime is not None

    async def start(self, agents: AgentEndpoint, tasks: BackgroundTasks) -> None:
        self._folder.take()
        try:
            await self._start()
        except BaseException:
            self._folder.give_back()
            raise
        self._agents, self._tasks = agents, tasks

    async def _start(self) -> None:
        try:
            await anyio.to_thread.run_sync(self._clear_run_dir)
        except OSError as error:
            raise unusable(self._run_dir, error) from error
        try:
            version = await self._engine.open()
            await self._runtime.check()
            self._uids = UidSets(self._settings, from_range=not await self._engine.remaps_users())
            if not await self._engine.holds_limits():
                self._limits = (
                    "memory, cpus and pids are NOT held: a rootless engine needs control groups version 2"
                )
                log.warning(self._limits)
            swept = await self._sweep()
            stale = await self._volumes.sweep()
            how = await self._first_choice()
            self._carried = await choose_python(self._settings.docker_python, self._runtimes)
        except SandboxUnavailable as error:
            raise not_possible(error) from error
        self._version, self._reached = version, how
        if swept or stale:
            log.info("of an earlier server were removed: %d containers, %d volumes", swept, stale)

    async def _first_choice(self) -> str:
        """The transport in words. Raises StartupError without the default image, where that is needed, and
        SandboxUnavailable."""
        default = self._settings.docker_image
        image = await self._engine.image(default)
        if image is None:
            missing = f"Docker has no image {default} (sandboxes.docker_image); docker pull {default}"
            if self._needs_image:
                raise StartupError(missing)
            log.warning("tasks that name no image will be refused: %s", missing)
            image = await self._engine.any_image()
        if image is None:
            return "transport not chosen yet: the engine has no image to try it with"
        choice = await self._transport.choose(image)
        return f"transport {choice.transport} ({choice.why})"

    async def create(self, spec: SandboxSpec) -> Sandbox:
        agents, tasks = self._agents, self._tasks
        if agents is None or tasks is None:
            raise SandboxUnavailable("the sandbox provider is not started, or closed")
        for mount in spec.mounts:
            if not mount.source.is_dir():
                raise SandboxUnavailable(f"{mount.source}, which the sandbox mounts, is not a folder")
        name = spec.image or self._settings.docker_image
        image = await self._engine.image(name)
        if image is None:
            missing = f"Docker has no image {name}; fetch or build it first (docker pull {name})"
            if spec.image is None:
                raise SandboxUnavailable(f"{missing}, or name another one (sandboxes.docker_image)")
            raise TaskFailed(missing)
        spec = containers.with_workdir(spec, image, name)
        self._remove_left(tasks)
        sandbox_id = _PREFIX + secrets.token_hex(6)  # short: it is part of the sockets' paths
        runtime = self._carried.runtime if containers.can_carry(image) else None
        runs_helper = runtime is not None or await self._probes.runs_helper(image, name, tasks)
        if spec.network is not None and not runs_helper:
            raise TaskFailed(
                f"the task asks for a network, but image {name} cannot run the helper, which forwards it"
            )
        uids = self._uids.take()
        new = NewSandbox(spec, image, name, containers.name(sandbox_id), self._labels(sandbox_id), uids, runtime)
        made: HelperSandbox | ExecSandbox
        if runs_helper:
            made = await self._with_helper(sandbox_id, new, agents, tasks)
        else:
            made = await self._without_helper(sandbox_id, new, tasks)
        if self._agents is None:
            await made.destroy()
            raise SandboxUnavailable("the sandbox provider was closed")
        return made

    async def image_facts(self, image: str | None) -> ImageFacts | None:
        found = await self._engine.image(image or self._settings.docker_image)
        return None if found is None else ImageFacts(found.image_id, found.size)

    async def close(self) -> None:
        started = self._agents is not None
        self._agents = None
        self._probes.cancel()
        self._volumes.cancel()
        async with anyio.create_task_group() as ending:
            for sandbox in list(self._open.values()):
                ending.start_soon(_destroy, sandbox)
            for undoing in list(self._undoing):
                ending.start_soon(undoing.ended.wait)
            ending.start_soon(self._volumes.ended)
            ending.start_soon(self._undone)
        try:
            if started:
                await self._sweep()
                if self._ephemeral:
                    await self._volumes.sweep(all_of_them=True)
        except SandboxUnavailable as error:
            log.warning("containers may be left for the next start to remove: %s", error.message)
        self._engine.close()
        self._folder.give_back()

    async def _undone(self) -> None:
        if not await self._engine.undone():
            log.warning("calls that were given up go on in the engine: the next start removes what they make")

    # Making.

    async def _with_helper(
        self, sandbox_id: str, new: NewSandbox, agents: AgentEndpoint, tasks: BackgroundTasks
    ) -> HelperSandbox:
        choice = await self._transport.choose(new.image)
        make = SocketLaunch if choice.transport == BIND else StreamLaunch
        network = SandboxNetwork.of(new.spec, self._egress, tasks, sandbox_id)
        launch: Launch = make(self._launcher, new, self._run_dir / sandbox_id, agents, tasks, network)
        try:
            client = await launch.run()
            own_kernel = (await self._runtime.kernel(new.image)).own
            layout = containers.layout(new.spec, new.image, new.uids, new.python, own_kernel=own_kernel)
            release = partial(self._release, sandbox_id, new.uids)
            death = partial(self._death, sandbox_id)
            sandbox = HelperSandbox(sandbox_id, client, launch.link, layout, self._settings, release, tasks, death)
            await sandbox.open()
        except BaseException:
            await self._undo(new, launch.link, tasks)
            raise
        self._open[sandbox_id] = sandbox
        return sandbox

    async def _without_helper(self, sandbox_id: str, new: NewSandbox, tasks: BackgroundTasks) -> ExecSandbox:
        try:
            await self._launcher.without_helper(new, tasks)
            own_kernel = (await self._runtime.kernel(new.image)).own
            layout = containers.layout(new.spec, new.image, new.uids, new.python, own_kernel=own_kernel)
            release = partial(self._release, sandbox_id, new.uids)
            sandbox = ExecSandbox(sandbox_id, self._engine, new.container, layout, self._settings, release, tasks)
            await sandbox.open()
        except BaseException:
            await self._undo(new, None, tasks)
            raise
        self._open[sandbox_id] = sandbox
        return sandbox

    # Ending.

    async def _death(self, sandbox_id: str) -> SandboxDeath:
        """The cause of a sandbox's death. Only its container shows it, and the engine knows it a moment later."""
        state: ContainerState | None = None
        try:
            with anyio.fail_after(_DIAGNOSIS_S):
                for _ in range(_SETTLE_LOOKS):
                    state = await self._engine.state(containers.name(sandbox_id))
                    if state is None or not state.running or state.paused:
                        break
                    await anyio.sleep(_SETTLE_S)
        except (SandboxUnavailable, TimeoutError) as error:
            log.warning("a sandbox died with its engine: %s", error, extra={"sandbox": sandbox_id})
            return SandboxDeath.OUTSIDE
        if state is None:
            log.warning("a sandbox's container was removed", extra={"sandbox": sandbox_id})
            return SandboxDeath.OUTSIDE
        why = "its memory ran out" if state.out_of_memory else f"exit code {state.exit_code}"
        log.warning(
            "a sandbox's container ended: %s",
            "it still runs" if state.running else why,
            extra={"sandbox": sandbox_id},
        )
        return state.death

    async def _undo(self, new: NewSandbox, link: SandboxLink | None, tasks: BackgroundTasks) -> None:
        """Removes what a failed creation has made, in the background: a caller that is cancelled again may not
        leave half a sandbox."""

        async def undo() -> None:
            try:
                await self._remove(new.container)
            finally:
                self._uids.give_back(new.uids)
                if link is not None:
                    await link.close()

        undoing = tasks.start(undo, name=f"undo {new.container}")
        self._keep_undoing(undoing)
        with anyio.CancelScope(shield=True):
            await undoing.wait()

    def _keep_undoing(self, task: BackgroundTask[None]) -> None:
        """``close`` waits for it."""
        self._undoing = {each for each in self._undoing if not each.ended.is_set()}
        self._undoing.add(task)

    async def _release(self, sandbox_id: str, uids: Uids) -> None:
        self._open.pop(sandbox_id, None)
        await self._remove(containers.name(sandbox_id))
        self._uids.give_back(uids)

    async def _remove(self, container: str) -> None:
        """Never raises: a container that the engine does not remove now is removed when it answers again, or by
        the sweep at close or next start."""
        for pause_s in (*_REMOVE_AGAIN_S, None):
            try:
                await self._engine.remove(container)
                return
            except SandboxUnavailable as error:
                if pause_s is None or self._agents is None:
                    log.warning("a container may be left for the next sweep to remove: %s", error.message)
                    self._left.add(container)
                    return
            await anyio.sleep(pause_s)

    def _remove_left(self, tasks: BackgroundTasks) -> None:
        """The engine has just answered: perhaps it removes what it did not remove before."""
        left, self._left = self._left, set()
        for container in left:
            self._keep_undoing(tasks.start(partial(self._remove, container), name=f"remove {container}"))

    async def _sweep(self) -> int:
        """Removes every container of this owner; how many there were. Raises SandboxUnavailable."""
        left = await self._engine.labelled(containers.OWNER_LABEL, self._owner)
        failures: list[SandboxUnavailable] = []

        async def remove(container: str) -> None:
            try:
                await self._engine.remove(container)
            except SandboxUnavailable as error:
                failures.append(error)

        async with anyio.create_task_group() as removing:
            for container in left:
                removing.start_soon(remove, container)
        if failures:
            raise failures[0]
        return len(left)

    def _clear_run_dir(self) -> None:
        for folder in self._run_dir.glob(f"{_PREFIX}*/"):
            shutil.rmtree(folder)

    def _labels(self, sandbox_id: str) -> dict[str, str]:
        return {containers.OWNER_LABEL: self._owner, containers.SANDBOX_LABEL: sandbox_id}


async def _destroy(sandbox: HelperSandbox | ExecSandbox) -> None:
    try:
        await sandbox.destroy()
    except Exception as error:  # noqa: BLE001 - the others are destroyed all the same
        log.warning("a sandbox could not be destroyed: %s", error)
