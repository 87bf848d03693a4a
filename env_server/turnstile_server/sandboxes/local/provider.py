"""Sandboxes on this machine without a container engine: bubblewrap; without it, only if allowed, no isolation.

What must hold: nothing is assumed about the machine, each ability is tried at start; a sandbox's process, group,
files and record have one owner, ``LocalProcess``, which releases all of them whatever of them exists; no sandbox
outlives the server: it dies with the thread that launched it, with its connection, and at the latest in the sweep
of the next server on the same folder.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import secrets
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from turnstile_server.errors import SandboxUnavailable, StartupError, TaskFailed
from turnstile_server.sandboxes.background import BackgroundTasks
from turnstile_server.sandboxes.endpoint import AgentEndpoint
from turnstile_server.sandboxes.helper import HELPER_FOLDER
from turnstile_server.sandboxes.helper_client import HelperLink
from turnstile_server.sandboxes.helper_sandbox import HelperSandbox, Layout
from turnstile_server.sandboxes.local import bubblewrap, cgroups, orphans, probe
from turnstile_server.sandboxes.local.process import LocalProcess
from turnstile_server.sandboxes.protocol import Mount, ProviderSetup, SandboxLimits, SandboxSpec, User
from turnstile_server.sandboxes.run_folder import RunFolder, unusable
from turnstile_server.sandboxes.sockets import SandboxSockets
from turnstile_server.settings import SandboxSettings

_LOG = logging.getLogger(__name__)
_OWN = "sb-"
"""How every name in the run folder begins, so that nothing else is ever swept."""
_ETC = f"{_OWN}etc"
_OURS = Path(__file__).parents[2]
"""This package, the hidden tests and solutions of the shipped tasks in it."""
_PROBE_LIMITS = SandboxLimits(memory_bytes=64 << 20, cpus=1.0, pids=16, disk_bytes=1 << 20)


class LocalProvider:
    """``run_dir``: this server's own folder for its sandboxes, the same at every start on one data directory (or
    orphans are not found), and short. ``as_root``: try for two
    uids inside (None: when the server is root). ``hidden``: files and folders that no sandbox may show, even where
    they lie in what every sandbox shows of the host; this package and ``run_dir`` always are."""

    name = "local"
    missing: str | None = None

    def __init__(
        self,
        settings: SandboxSettings,
        run_dir: Path,
        *,
        as_root: bool | None = None,
        hidden: Sequence[Path] = (),
    ) -> None:
        self._settings = settings
        self._run_dir = run_dir
        self._folder = RunFolder(run_dir)
        self._hidden = (_OURS, run_dir, *hidden)
        self._as_root = os.geteuid() == 0 if as_root is None else as_root
        self._python = bubblewrap.HostPython(os.path.realpath(sys.executable), sys.base_prefix)
        self._frame: bubblewrap.Frame | None = None
        self._cgroups: cgroups.Cgroups | None = None
        self._agents: AgentEndpoint | None = None
        self._undoing: set[asyncio.Task[None]] = set()
        self._sandboxes: dict[str, HelperSandbox] = {}

    @classmethod
    def from_setup(cls, setup: ProviderSetup) -> LocalProvider:
        return cls(setup.settings, setup.run_dir, hidden=setup.hidden)

    @property
    def isolated(self) -> bool:
        return self._frame is not None

    @property
    def limits_held(self) -> str:
        """Which of a spec's limits hold for a sandbox as a whole, in words, for the log."""
        if self._cgroups is not None:
            return f"memory, cpus and pids by control groups (version {self._cgroups.version})"
        return (
            "none of memory, cpus and pids as a whole: no control group can be made; resource limits per process"
        )

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
        self._agents = agents

    async def _start(self) -> None:
        self._cgroups = await asyncio.to_thread(cgroups.find, control_group_prefix(self._run_dir))
        await self._sweep()
        etc = self._run_dir / _ETC
        etc.mkdir()
        for name, text in bubblewrap.passwd(self._settings.agent_uid, self._settings.tests_uid).items():
            (etc / name).write_text(text)
            (etc / name).chmod(0o644)
        problem = await self._probe(etc)
        if problem is None:
            _LOG.info("sandboxes: bubblewrap; limits: %s", self.limits_held)
        elif self._settings.allow_unisolated:
            _LOG.warning(
                "sandboxes: NO ISOLATION, agents run with the server's own rights "
                "(sandboxes.allow_unisolated), because %s",
                problem,
            )
        else:
            raise StartupError(
                f"sandboxes.kind = local needs bubblewrap, but {problem}. Install it (package `bubblewrap`) and "
                "allow user name spaces, use Docker, or, for experiments only, set sandboxes.allow_unisolated"
            )

    async def create(self, spec: SandboxSpec) -> HelperSandbox:
        if spec.image is not None:
            raise TaskFailed(
                f"the task asks for the image {spec.image}; local sandboxes have no images, only Docker has"
            )
        if spec.image_files:
            raise TaskFailed("the task's files are in an image; local sandboxes have no images, only Docker has")
        _check_mounts(spec.mounts, self.isolated)
        if self._agents is None:
            raise SandboxUnavailable("the sandbox provider is not started, or closed")
        name = f"{_OWN}{secrets.token_hex(6)}"
        launched = LocalProcess(name, self._run_dir)
        folder = self._run_dir / name
        door = SandboxSockets(
            folder,
            self._agents,
            name=name,
            **({} if self.isolated else {"mounted_at": str(folder)}),
        )
        link: HelperLink | None = None
        try:
            await door.open()
            await self._launch(launched, door, spec)
            link = await self._dialed_in(launched, door)
            sandbox = HelperSandbox(
                name, link, door, self._layout(launched, spec), self._settings, lambda: self._release(launched)
            )
            await sandbox.open()
        except BaseException:
            # On its own: a caller that is cancelled twice may not leave half a sandbox.
            undoing = asyncio.create_task(self._undo(launched, door, link), name=f"undo {name}")
            self._undoing.add(undoing)
            undoing.add_done_callback(self._undoing.discard)
            await asyncio.shield(undoing)
            raise
        self._sandboxes[name] = sandbox
        return sandbox

    async def close(self) -> None:
        self._agents = None
        results = await asyncio.gather(
            *(sandbox.destroy() for sandbox in list(self._sandboxes.values())),
            *self._undoing,
            return_exceptions=True,
        )
        for result in results:
            if isinstance(result, BaseException):
                _LOG.error("a sandbox could not be destroyed", exc_info=result)
        if self._folder.taken:
            await asyncio.to_thread(shutil.rmtree, self._run_dir / _ETC, ignore_errors=True)
        self._folder.give_back()

    async def _undo(self, launched: LocalProcess, door: SandboxSockets, link: HelperLink | None) -> None:
        if link is not None:
            await link.close()
        await self._release(launched)
        await door.close()

    async def _release(self, launched: LocalProcess) -> None:
        try:
            await launched.release(self._settings.call_timeout_s)
        finally:
            self._sandboxes.pop(launched.name, None)

    async def _launch(self, launched: LocalProcess, door: SandboxSockets, spec: SandboxSpec) -> None:
        """Raises SandboxUnavailable."""
        environment = {"PATH": self._python.search_path, "LANG": "C.UTF-8", **door.environment}
        try:
            if self._frame is not None:
                command = bubblewrap.helper_command(self._frame, spec, door.folder)
                if self._cgroups is not None:
                    launched.group = self._cgroups.make(launched.name, spec.limits)
                    command = launched.group.joining(command)
            else:
                command = [self._python.executable, *bubblewrap.HELPER_FLAGS, str(HELPER_FOLDER)]
                launched.files.mkdir(mode=0o700)
                launched.marked = True
            await launched.run(command, environment)
        except OSError as error:
            raise SandboxUnavailable(f"no sandbox could be launched: {error.strerror or error}") from error

    async def _dialed_in(self, launched: LocalProcess, door: SandboxSockets) -> HelperLink:
        """The helper's call, or at once why there will be none."""
        calling = asyncio.create_task(door.dialed_in(self._settings.start_timeout_s))
        ended = asyncio.create_task(launched.ended())
        try:
            await asyncio.wait([calling, ended], return_when=asyncio.FIRST_COMPLETED)
            if calling.done():
                return calling.result()
            raise SandboxUnavailable(
                f"a sandbox ended before it was ready: {launched.said() or 'it said nothing'}"
            )
        finally:
            for task in (calling, ended):
                task.cancel()
            await asyncio.wait([calling, ended])

    def _layout(self, launched: LocalProcess, spec: SandboxSpec) -> Layout:
        rlimits = {"CORE": 0, "FSIZE": spec.limits.disk_bytes}
        if self._frame is None:
            files = launched.files
            return Layout(
                workdir=str(files / "workspace"),
                path=self._python.search_path,
                homes={User.AGENT: str(files / "agent"), User.TESTS: str(files / "tests")},
                temporary=str(files / "tmp"),
                own_processes=False,
                change_users=False,
                rlimits={**rlimits, "DATA": spec.limits.memory_bytes},
                forward_port=0,
                marks={orphans.MARK_VARIABLE: launched.name},
            )
        if self._cgroups is None:
            rlimits["DATA"] = spec.limits.memory_bytes
            if not self._frame.privileged:
                # Counted per user name space, so per sandbox; without one it would count all sandboxes together,
                # and for a server that is root the kernel does not look at it.
                rlimits["NPROC"] = spec.limits.pids
        return Layout(workdir=spec.workdir, path=self._python.search_path, rlimits=rlimits)

    async def _probe(self, etc: Path) -> str | None:
        """Why there is no isolation; None: there is, and ``self._frame`` says of which kind."""
        bwrap = shutil.which("bwrap")
        if bwrap is None:
            return "there is no `bwrap`"
        said = ""
        environment = {"PATH": self._python.search_path}
        hidden = bubblewrap.shown_of(self._hidden, self._python)
        for privileged in (True, False) if self._as_root else (False,):
            frame = bubblewrap.Frame(bwrap, self._python, etc, privileged, self._settings.agent_uid, hidden)
            command = [self._python.executable, *bubblewrap.HELPER_FLAGS, "-c", ""]
            wrapped = bubblewrap.wrap(frame, SandboxSpec(_PROBE_LIMITS), (), command)
            said = await probe.probe_error(wrapped, environment, self._settings.start_timeout_s)
            if not said:
                self._frame = frame
                return None
        return f"it does not work here: {said}"

    async def _sweep(self) -> None:
        """Removes what an earlier server left here."""
        for record in self._run_dir.glob(f"{_OWN}*{orphans.RECORD_SUFFIX}"):
            orphans.kill_recorded(record)
            name = record.name.removesuffix(orphans.RECORD_SUFFIX)
            if not await asyncio.to_thread(orphans.kill_marked, name):
                _LOG.warning("processes of the sandbox %s of an earlier server do not go", name)
        if self._cgroups is not None:
            for group in self._cgroups.left():
                if not await group.remove():
                    _LOG.warning("a control group of an earlier server does not go: %s", group.folders[0])
        for path in list(self._run_dir.glob(f"{_OWN}*")):
            if path.is_dir() and not path.is_symlink():
                await asyncio.to_thread(shutil.rmtree, path, ignore_errors=True)
            else:
                path.unlink()


def control_group_prefix(run_dir: Path) -> str:
    """How the names of a server's control groups begin: the same at every start on one folder."""
    return f"turnstile-{hashlib.sha256(bytes(run_dir.resolve())).hexdigest()[:12]}-"


def _check_mounts(mounts: Sequence[Mount], isolated: bool) -> None:
    for mount in mounts:
        if not mount.source.exists():
            raise SandboxUnavailable(f"the folder {mount.source}, which a sandbox is to mount, is not there")
        if not isolated and str(mount.source) != mount.target:
            raise TaskFailed(
                f"{mount.source} cannot be put at {mount.target}: without isolation a sandbox has the host's own "
                "paths (install bubblewrap, or use Docker)"
            )
