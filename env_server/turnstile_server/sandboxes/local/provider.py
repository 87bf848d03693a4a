"""Sandboxes on this machine without a container engine: bubblewrap; without it, only if allowed, no isolation.

What must hold: nothing is assumed about the machine, each ability is tried at start; a sandbox's process, control
group, files and record have one owner, ``LocalProcess``, which releases all of them in any state; no sandbox
outlives the server: it dies with the thread that launched it, with its connection, and at the latest in the sweep
of the next server on the same folder.
"""

from __future__ import annotations

import hashlib
import logging
import os
import secrets
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import anyio
import anyio.to_thread

from turnstile_server.egress.proxy import EgressProxy
from turnstile_server.errors import SandboxUnavailable, StartupError, TaskFailed
from turnstile_server.sandboxes import call_filter
from turnstile_server.sandboxes.background import BackgroundTask, BackgroundTasks
from turnstile_server.sandboxes.endpoint import AgentEndpoint
from turnstile_server.sandboxes.helper import HELPER_FOLDER, compiled_helper
from turnstile_server.sandboxes.helper_client import HelperClient
from turnstile_server.sandboxes.helper_sandbox import HelperSandbox, Layout
from turnstile_server.sandboxes.local import bubblewrap, cgroups, diagnosis, orphans
from turnstile_server.sandboxes.local.image_root import ImageRoot
from turnstile_server.sandboxes.local.machine_kills import MachineKills
from turnstile_server.sandboxes.local.process import LocalProcess, probe_error
from turnstile_server.sandboxes.network import SandboxNetwork
from turnstile_server.sandboxes.protocol import ImageFacts, Mount, ProviderSetup, SandboxLimits, SandboxSpec, User
from turnstile_server.sandboxes.run_folder import RunFolder, remove_folder, unusable
from turnstile_server.sandboxes.sockets import SandboxSockets
from turnstile_server.sandboxes.users import UidSets, range_is_mapped, uids_of
from turnstile_server.settings import SandboxSettings

_LOG = logging.getLogger(__name__)
_OWN = "sb-"
"""Prefix of every name in the run folder, so that nothing else is ever swept."""
_HELPER = "turnstile-helper"
"""The helper's compiled copy in the run folder, made anew by each server."""
_PACKAGE = Path(__file__).parents[2]
"""The server's package, with the hidden tests and solutions of the shipped tasks."""
_PROBE_LIMITS = SandboxLimits(memory_bytes=64 << 20, cpus=1.0, pids=16, disk_bytes=1 << 20)


class LocalProvider:
    """A ``SandboxProvider``.

    ``run_dir``, ``egress`` and ``hidden``: see ``ProviderSetup``. This package and ``run_dir`` are always hidden.
    ``as_root``: try for a uid of each user (None: when the server is root).
    """

    name = "local"
    missing: str | None = None

    def __init__(
        self,
        settings: SandboxSettings,
        run_dir: Path,
        *,
        as_root: bool | None = None,
        hidden: Sequence[Path] = (),
        egress: EgressProxy | None = None,
    ) -> None:
        self._settings = settings
        self._egress = egress
        self._uids = UidSets(settings, from_range=False)
        self._run_dir = run_dir
        self._folder = RunFolder(run_dir)
        self._hidden = (_PACKAGE, run_dir, *hidden)
        self._as_root = os.geteuid() == 0 if as_root is None else as_root
        self._python = bubblewrap.HostPython(os.path.realpath(sys.executable), sys.base_prefix)
        self._frame: bubblewrap.SandboxFrame | None = None
        self._together = ""
        """Reason why users of one uid cannot be kept apart; empty where they can."""
        self._problem: str | None = None
        """Reason why there is no frame."""
        self._cgroups: cgroups.Cgroups | None = None
        self._kills = MachineKills()
        self._watching: BackgroundTask[None] | None = None
        """Looks at ``_kills``; None where control groups tell more."""
        self._agents: AgentEndpoint | None = None
        self._tasks: BackgroundTasks | None = None
        self._undoing: set[BackgroundTask[None]] = set()
        """Creations that failed and are being undone."""
        self._sandboxes: dict[str, HelperSandbox] = {}

    @classmethod
    def from_setup(cls, setup: ProviderSetup) -> LocalProvider:
        return cls(setup.settings, setup.run_dir, hidden=setup.hidden, egress=setup.egress)

    @property
    def isolated(self) -> bool:
        return self._frame is not None

    @property
    def carries_runtime(self) -> bool:
        return False

    @property
    def description(self) -> str:
        if self._frame is None:
            return (
                "local: NO ISOLATION, agents run with the server's own rights (sandboxes.allow_unisolated), "
                f"because {self._problem}"
            )
        if self._cgroups is not None:
            held = f"memory, cpus and pids by control groups (version {self._cgroups.version})"
        elif self._frame.privileged:
            held = "memory per process, processes per user; cpus are not held (no control group can be made)"
        else:
            held = "memory per process, pids; cpus are not held (no control group can be made)"
        if self._frame.privileged:
            users = "a uid for each user" + (" of each sandbox" if self._uids.own else "")
        elif self._frame.compartments:
            users = "one uid, users kept apart by name spaces"
        else:
            users = f"one uid, users NOT kept apart ({self._together})"
        return f"{self.name}: bubblewrap, {users}; limits: {held}"

    async def start(self, agents: AgentEndpoint, tasks: BackgroundTasks) -> None:
        self._folder.take()
        try:
            await self._start()
        except OSError as error:
            self._folder.give_back()
            raise unusable(self._run_dir, error) from error
        except BaseException:
            self._folder.give_back()
            raise
        self._agents, self._tasks = agents, tasks
        if self._cgroups is None:
            self._watching = tasks.start(self._kills.watch, name="count kills for memory", shielded=False)

    async def _start(self) -> None:
        self._cgroups = await anyio.to_thread.run_sync(cgroups.find, control_group_prefix(self._run_dir))
        await self._sweep()
        self._uids = UidSets(self._settings, from_range=range_is_mapped(self._settings, *_own_maps()))
        with tempfile.TemporaryDirectory(prefix=_OWN, dir=self._run_dir) as etc:
            problem = await self._probe(Path(etc))
        if problem is not None and not self._settings.allow_unisolated:
            raise StartupError(f"local sandboxes need bubblewrap: {problem}")
        self._problem = problem
        if self._frame is not None:
            await remove_folder(self._run_dir / _HELPER)
            helper = await anyio.to_thread.run_sync(compiled_helper, self._run_dir / _HELPER)
            self._frame = replace(self._frame, helper=helper)

    async def root_of(self, spec: SandboxSpec) -> tuple[SandboxSpec, ImageRoot | None]:
        """The files that a sandbox has as its root, None being the host's system, and the spec for that. Raises
        TaskFailed, SandboxUnavailable."""
        if spec.image is not None:
            raise TaskFailed(
                f"the task asks for the image {spec.image}; local sandboxes have no images (sandboxes.kind: "
                "docker, or oci)"
            )
        if spec.image_files:
            raise TaskFailed(
                "the task's files are in an image; local sandboxes have no images (sandboxes.kind: docker, or oci)"
            )
        if spec.folders:
            raise TaskFailed(
                f"the task needs the folders {', '.join(spec.folders)}, which only sandboxes with images have "
                "(sandboxes.kind: docker, or oci)"
            )
        return spec, None

    async def create(self, spec: SandboxSpec) -> HelperSandbox:
        spec, root = await self.root_of(spec)
        _check_mounts(spec.mounts, self.isolated)
        if self._agents is None or self._tasks is None:
            raise SandboxUnavailable("the sandbox provider is not started, or closed")
        name = f"{_OWN}{secrets.token_hex(6)}"
        process = LocalProcess(name, self._run_dir, self._tasks, self._kills)
        folder = self._run_dir / name
        mounted_at = {} if self.isolated else {"mounted_at": str(folder)}
        network = SandboxNetwork.of(spec, self._egress, self._tasks, name)
        sockets = SandboxSockets(folder, self._agents, self._tasks, name=name, network=network, **mounted_at)
        try:
            await sockets.open()
            await self._launch(process, sockets, spec, root)
            client = await self._dialed_in(process, sockets)
            layout = self._layout(process, spec, root)
            release = partial(self._release, process)
            sandbox = HelperSandbox(
                name, client, sockets, layout, self._settings, release, self._tasks, process.death
            )
            await sandbox.open()
            if self.isolated and not sandbox.filtered:
                raise SandboxUnavailable("a sandbox's helper did not install the system call filter")
        except BaseException:
            # In the background: a caller that is cancelled again may not leave half a sandbox.
            undoing = self._tasks.start(partial(self._undo, process, sockets), name=f"undo {name}")
            self._undoing.add(undoing)
            with anyio.CancelScope(shield=True):
                await undoing.wait()
            raise
        self._sandboxes[name] = sandbox
        return sandbox

    async def image_facts(self, image: str | None) -> ImageFacts | None:
        return None

    async def close(self) -> None:
        self._agents = None
        if self._watching is not None:
            await self._watching.stop()
        async with anyio.create_task_group() as ending:
            for sandbox in list(self._sandboxes.values()):
                ending.start_soon(_destroy, sandbox)
            for undoing in list(self._undoing):
                ending.start_soon(undoing.ended.wait)
        if self._folder.taken:
            await remove_folder(self._run_dir / _HELPER)
        self._folder.give_back()

    async def _undo(self, process: LocalProcess, sockets: SandboxSockets) -> None:
        try:
            try:
                await self._release(process)
            finally:
                await sockets.close()
        except Exception:
            _LOG.exception("a sandbox that could not be made was not removed")
            raise
        finally:
            self._undoing = {each for each in self._undoing if not each.ended.is_set()}

    async def _release(self, process: LocalProcess) -> None:
        try:
            await process.release(self._settings.call_timeout_s)
        finally:
            if process.uids is not None:
                self._uids.give_back(process.uids)
            self._sandboxes.pop(process.name, None)

    async def _launch(
        self, process: LocalProcess, sockets: SandboxSockets, spec: SandboxSpec, root: ImageRoot | None
    ) -> None:
        """Raises SandboxUnavailable."""
        path = self._python.search_path if root is None else root.image.path
        environment = {"PATH": path, "LANG": "C.UTF-8", **sockets.environment}
        try:
            if self._frame is not None:
                if self._frame.privileged:
                    process.uids = self._uids.take()
                process.helper_depth = 2 if self._frame.compartments else 1
                bubblewrap.write_etc(process.files, process.uids or uids_of(self._settings))
                command = bubblewrap.helper_command(self._frame, process.files, spec, sockets.folder, root)
                if self._cgroups is not None:
                    process.group = self._cgroups.make(process.name, spec.limits)
                    command = process.group.joining(command)
            else:
                command = [self._python.executable, *bubblewrap.HELPER_FLAGS, str(HELPER_FOLDER)]
                process.files.mkdir(mode=0o700)
                process.marked = True
            await process.run(command, environment)
        except OSError as error:
            raise SandboxUnavailable(f"no sandbox could be launched: {error.strerror or error}") from error

    async def _dialed_in(self, process: LocalProcess, sockets: SandboxSockets) -> HelperClient:
        """Waits for the helper's call. Raises SandboxUnavailable, and at once where its process has ended."""
        client: HelperClient | None = None
        failure: SandboxUnavailable | None = None
        async with anyio.create_task_group() as racing:

            async def give_up_at_the_end() -> None:
                await process.ended()
                racing.cancel_scope.cancel()

            racing.start_soon(give_up_at_the_end)
            try:
                client = await sockets.dialed_in(self._settings.start_timeout_s)
            except SandboxUnavailable as error:  # raised below: the group would wrap it
                failure = error
            racing.cancel_scope.cancel()
        if client is not None:
            return client
        raise failure or SandboxUnavailable(
            f"a sandbox ended before it was ready: {process.output() or 'it printed nothing'}"
        )

    def _layout(self, process: LocalProcess, spec: SandboxSpec, root: ImageRoot | None) -> Layout:
        rlimits = {"CORE": 0, "FSIZE": spec.limits.disk_bytes}
        if self._frame is None:
            files = process.files
            return Layout(
                workdir=str(files / "workspace"),
                path=self._python.search_path,
                homes={user: str(files / user) for user in User},
                temporary=str(files / "tmp"),
                own_processes=False,
                rlimits={**rlimits, "DATA": spec.limits.memory_bytes},
                filtered=False,
                forward_port=0,
                network_port=0,
                marks={orphans.MARK_VARIABLE: process.name},
            )
        if self._cgroups is None:
            rlimits["DATA"] = spec.limits.memory_bytes
            if not self._frame.privileged or self._uids.own:
                # The kernel counts per uid and user name space: per sandbox, or per user of a sandbox. Where all
                # sandboxes have the same uids it would count them together.
                rlimits["NPROC"] = spec.limits.pids
        disk: dict[str, object] = {"size": spec.limits.disk_bytes, "files": spec.limits.files}
        layout = Layout(
            disk=disk if self._frame.mounts_disk else None,
            workdir=spec.workdir,
            path=self._python.search_path,
            uids=process.uids or {},
            compartments=self._frame.compartments,
            rlimits=rlimits,
            environment=dict(spec.env),
        )
        if root is None:
            return layout
        return replace(
            layout,
            disk={**disk, "folders": root.folders(spec), "kept": root.kept(spec)},
            path=root.image.path,
            python=root.python,
            own_tree=spec.image_files,
            passable=spec.passable if spec.image_files else (),
            environment={**(root.image.variables if spec.image_files else {}), **dict(spec.env)},
        )

    async def _probe(self, etc: Path) -> str | None:
        """Reason why isolation does not work; None: it works, and ``self._frame`` is set."""
        bwrap = shutil.which("bwrap")
        if bwrap is None:
            return diagnosis.lacking(diagnosis.look())
        if not call_filter.known_machine():
            known = " and ".join(call_filter.MACHINES)
            return f"the system call filter knows {known}, this machine is neither"
        bubblewrap.write_etc(etc, uids_of(self._settings))
        problem = ""
        environment = {"PATH": self._python.search_path}
        hidden = bubblewrap.shown_of(self._hidden, self._python)
        plain = bubblewrap.SandboxFrame(
            bwrap, self._python, privileged=False, agent_uid=self._settings.agent_uid, hidden=hidden
        )
        apart = replace(plain, compartments=True, visible_proc=os.geteuid() == 0)
        frames = [apart, replace(plain, one_user_name_space=True), plain]
        for frame in [replace(plain, privileged=True), *frames] if self._as_root else frames:
            wrapped = bubblewrap.probe_command(frame, etc, SandboxSpec(_PROBE_LIMITS))
            problem = await probe_error(wrapped, environment, self._settings.start_timeout_s)
            if frame is apart:
                self._together = problem
            if not problem:
                self._frame = frame
                return None
        return diagnosis.failing(problem, diagnosis.look())

    async def _sweep(self) -> None:
        """Removes what an earlier server left here."""
        for record in self._run_dir.glob(f"{_OWN}*{orphans.RECORD_SUFFIX}"):
            orphans.kill_recorded(record)
            name = record.name.removesuffix(orphans.RECORD_SUFFIX)
            if not await anyio.to_thread.run_sync(orphans.kill_marked, name):
                _LOG.warning("processes of the sandbox %s of an earlier server cannot be killed", name)
        if self._cgroups is not None:
            for group in self._cgroups.left():
                if not await group.remove():
                    _LOG.warning("a control group of an earlier server cannot be removed: %s", group.folders[0])
        for path in list(self._run_dir.glob(f"{_OWN}*")):
            if path.is_dir() and not path.is_symlink():
                await remove_folder(path)
            else:
                path.unlink()


def control_group_prefix(run_dir: Path) -> str:
    """Prefix of a server's control groups: the same at every start on one folder."""
    return f"turnstile-{hashlib.sha256(bytes(run_dir.resolve())).hexdigest()[:12]}-"


async def _destroy(sandbox: HelperSandbox) -> None:
    try:
        await sandbox.destroy()
    except Exception:  # noqa: BLE001 - the others are destroyed all the same
        _LOG.exception("a sandbox could not be destroyed")


def _own_maps() -> list[str]:
    """The maps of this process's user name space."""
    return [Path(f"/proc/self/{kind}_map").read_text() for kind in ("uid", "gid")]


def _check_mounts(mounts: Sequence[Mount], isolated: bool) -> None:
    for mount in mounts:
        if not mount.source.exists():
            raise SandboxUnavailable(f"the folder {mount.source}, which a sandbox is to mount, is not there")
        if not isolated and str(mount.source) != mount.target:
            raise TaskFailed(
                f"{mount.source} cannot be put at {mount.target}: without isolation a sandbox has the host's own "
                "paths (install bubblewrap, or use Docker)"
            )
