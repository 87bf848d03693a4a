"""Sandboxes as Docker containers: ``SandboxProvider`` over the engine.

Owns every container that bears its ``turnstile.owner`` label: those it made, and those that an earlier server
with the same data directory left, which ``start`` removes. What must hold: a call of ``create`` that fails or is
cancelled, at whatever point, leaves no container, no folder and no socket; nothing that belongs to the agent
runs before the helper has dialed in.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import shutil
from pathlib import Path

from turnstile_server.errors import SandboxUnavailable, StartupError, TaskFailed
from turnstile_server.sandboxes.background import BackgroundTasks
from turnstile_server.sandboxes.docker import containers
from turnstile_server.sandboxes.docker.engine import DockerEngine, Image
from turnstile_server.sandboxes.docker.fallback import ExecSandbox
from turnstile_server.sandboxes.docker.probes import ImageProbes
from turnstile_server.sandboxes.docker.shielded import run_shielded
from turnstile_server.sandboxes.endpoint import AgentEndpoint
from turnstile_server.sandboxes.helper_client import HelperLink
from turnstile_server.sandboxes.helper_sandbox import HelperSandbox
from turnstile_server.sandboxes.protocol import ProviderSetup, Sandbox, SandboxSpec
from turnstile_server.sandboxes.run_folder import RunFolder, unusable
from turnstile_server.sandboxes.sockets import SandboxSockets
from turnstile_server.settings import SandboxSettings

log = logging.getLogger(__name__)

_PREFIX = "sb-"
_REMOVE_AGAIN_S = (0.5, 2.0)
"""Pauses before a removal that the engine refused is tried again; a busy engine refuses some."""
_LOOK_S = 1.0
"""How often a container whose helper has not called yet is looked at: it may have ended."""


class DockerProvider:
    """``run_dir``: this server's own folder for its sandboxes' sockets, locked while it serves; short. ``owner``:
    the same for every server with this data directory and for no other that uses this engine.
    ``needs_image``: ``start`` fails without the default image.
    ``known_images``: by image id whether it runs the helper, for providers that share what they learn."""

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
    ) -> None:
        self._settings = settings
        self._run_dir = run_dir
        self._folder = RunFolder(run_dir)
        self._owner = owner
        self._needs_image = needs_image
        self._engine = DockerEngine(settings)
        self._agents: AgentEndpoint | None = None
        self._open: dict[str, HelperSandbox | ExecSandbox] = {}
        self._probes = ImageProbes(
            self._engine, self._labels("probe"), self._remove, {} if known_images is None else known_images
        )
        self._watches: set[asyncio.Task[None]] = set()

    @classmethod
    def from_setup(cls, setup: ProviderSetup, *, needs_image: bool = False) -> DockerProvider:
        return cls(setup.settings, setup.run_dir, setup.owner, needs_image=needs_image)

    async def start(self, agents: AgentEndpoint, tasks: BackgroundTasks) -> None:
        self._folder.take()
        try:
            await self._start()
        except BaseException:
            self._folder.give_back()
            raise
        self._agents = agents

    async def _start(self) -> None:
        try:
            version = await self._engine.open()
            swept = await self._sweep()
            default = self._settings.docker_image
            if self._needs_image and await self._engine.image(default) is None:
                raise StartupError(
                    f"Docker has no image {default} (sandboxes.docker_image); docker pull {default}"
                )
        except SandboxUnavailable as error:
            raise StartupError(
                f"sandboxes in Docker are not possible: {error.message}. Start Docker, or name its address "
                "(sandboxes.docker_host, or DOCKER_HOST), or choose sandboxes.kind = local"
            ) from error
        try:
            await asyncio.to_thread(self._clear_run_dir)
        except OSError as error:
            raise unusable(self._run_dir, error) from error
        log.info("sandboxes: Docker %s; containers of an earlier server removed: %d", version, swept)

    async def create(self, spec: SandboxSpec) -> Sandbox:
        agents = self._agents
        if agents is None:
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
        sandbox_id = _PREFIX + secrets.token_hex(6)  # short: it is part of the sockets' paths
        made: HelperSandbox | ExecSandbox
        if await self._probes.runs_helper(image, name):
            made = await self._helped(sandbox_id, spec, image, name, agents)
        else:
            made = await self._plain(sandbox_id, spec, image, name)
        if self._agents is None:
            await made.destroy()
            raise SandboxUnavailable("the sandbox provider was closed")
        return made

    async def close(self) -> None:
        started = self._agents is not None
        self._agents = None
        self._probes.cancel()
        for task in self._watches:
            task.cancel()
        results = await asyncio.gather(
            *(each.destroy() for each in list(self._open.values())), return_exceptions=True
        )
        for error in results:
            if isinstance(error, BaseException):
                log.warning("a sandbox could not be destroyed: %s", error)
        try:
            if started:
                await self._sweep()
        except SandboxUnavailable as error:
            log.warning("containers may be left for the next start to remove: %s", error.message)
        self._engine.close()
        self._folder.give_back()

    # Making.

    async def _helped(
        self, sandbox_id: str, spec: SandboxSpec, image: Image, image_name: str, agents: AgentEndpoint
    ) -> HelperSandbox:
        folder = self._run_dir / sandbox_id
        door = SandboxSockets(
            folder,
            agents,
            name=sandbox_id,
        )
        container = containers.name(sandbox_id)
        link: HelperLink | None = None
        try:
            await door.open()
            body = containers.helped(
                spec, image, self._settings, self._labels(sandbox_id), door.environment, str(folder)
            )
            await self._engine.create(container, body, image_name=image_name)
            await self._engine.start(container, image_name=image_name)
            link = await self._dialed_in(door, container, image_name)
            layout = containers.layout(spec, image)
            sandbox = HelperSandbox(
                sandbox_id, link, door, layout, self._settings, lambda: self._release(sandbox_id)
            )
            await sandbox.open()
        except BaseException:
            await run_shielded(self._undo(container, door, link))
            raise
        self._open[sandbox_id] = sandbox
        self._watch(sandbox_id, sandbox)
        return sandbox

    async def _dialed_in(self, door: SandboxSockets, container: str, image_name: str) -> HelperLink:
        """Raises TaskFailed, with the helper's last words, where it ended without having called."""
        calling = asyncio.create_task(door.dialed_in(self._settings.start_timeout_s))
        try:
            while not (await asyncio.wait({calling}, timeout=_LOOK_S))[0]:
                state = await self._engine.state(container)
                if (state is None or not state.running) and not calling.done():
                    said = "" if state is None else state.error or await self._engine.log(container)
                    code = "it is gone" if state is None else f"exit code {state.exit_code}"
                    raise TaskFailed(f"the helper ended in a container of {image_name} ({code}): {said}")
            return await calling
        finally:
            calling.cancel()
            await asyncio.wait({calling})

    async def _plain(self, sandbox_id: str, spec: SandboxSpec, image: Image, image_name: str) -> ExecSandbox:
        container = containers.name(sandbox_id)
        try:
            body = containers.plain(spec, image, self._settings, self._labels(sandbox_id))
            await self._engine.create(container, body, image_name=image_name)
            await self._engine.start(container, image_name=image_name)
            layout = containers.layout(spec, image)
            sandbox = ExecSandbox(
                sandbox_id, self._engine, container, layout, self._settings, lambda: self._release(sandbox_id)
            )
            await sandbox.open()
        except BaseException:
            await run_shielded(self._remove(container))
            raise
        self._open[sandbox_id] = sandbox
        return sandbox

    # Ending.

    def _watch(self, sandbox_id: str, sandbox: HelperSandbox) -> None:
        """Says why a sandbox died, which only its container knows."""

        async def watch() -> None:
            await sandbox.lost.wait()
            if sandbox.destroyed:
                return
            try:
                state = await self._engine.state(containers.name(sandbox_id))
            except SandboxUnavailable as error:
                log.warning("a sandbox died: %s", error.message, extra={"sandbox": sandbox_id})
                return
            if state is not None and not state.running:
                why = "its memory ran out" if state.out_of_memory else f"exit code {state.exit_code}"
                log.warning("a sandbox's container ended: %s", why, extra={"sandbox": sandbox_id})

        task = asyncio.create_task(watch(), name=f"watch {sandbox_id}")
        self._watches.add(task)
        task.add_done_callback(self._watches.discard)

    async def _release(self, sandbox_id: str) -> None:
        self._open.pop(sandbox_id, None)
        await self._remove(containers.name(sandbox_id))

    async def _remove(self, container: str) -> None:
        """Never raises: what the engine does not remove now, the sweep at the close or the next start does."""
        for pause_s in (*_REMOVE_AGAIN_S, None):
            try:
                await self._engine.remove(container)
                return
            except SandboxUnavailable as error:
                if pause_s is None or self._agents is None:
                    log.warning("a container may be left for the next sweep to remove: %s", error.message)
                    return
            await asyncio.sleep(pause_s)

    async def _undo(self, container: str, door: SandboxSockets | None, link: HelperLink | None) -> None:
        """What a failed creation may have made. Never raises: the failure itself is what the caller is told."""
        try:
            if link is not None:
                await link.close()
            await self._remove(container)
        finally:
            if door is not None:
                await door.close()

    async def _sweep(self) -> int:
        left = await self._engine.labelled(containers.OWNER_LABEL, self._owner)
        await asyncio.gather(*(self._engine.remove(container) for container in left))
        return len(left)

    def _clear_run_dir(self) -> None:
        for folder in self._run_dir.glob(f"{_PREFIX}*/"):
            shutil.rmtree(folder)

    def _labels(self, sandbox_id: str) -> dict[str, str]:
        return {containers.OWNER_LABEL: self._owner, containers.SANDBOX_LABEL: sandbox_id}
