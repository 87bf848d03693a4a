"""A sandbox in a container that cannot run the helper: commands and files by the engine's exec.

Needs ``/bin/sh`` and the usual tools of the image: ``env cat head mkdir mv chmod stat find sed grep sleep mktemp``
and a ``tar`` that knows ``-o``. How it differs from a sandbox with a helper is in docs/sandboxes.md. Owns the
commands it started.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import anyio

from turnstile_server.egress.log import NetworkLog
from turnstile_server.egress.policy import NetworkPhase
from turnstile_server.errors import FileProblem, SandboxDeath, SandboxFailed, SandboxUnavailable, TaskFailed
from turnstile_server.sandboxes.background import BackgroundTask, BackgroundTasks
from turnstile_server.sandboxes.docker import scripts
from turnstile_server.sandboxes.docker.engine import DockerEngine
from turnstile_server.sandboxes.docker.exec_process import ExecProcess, wrapped
from turnstile_server.sandboxes.helper_sandbox import Layout
from turnstile_server.sandboxes.protocol import HOMES, MADE_AT_ONCE, Command, ExecResult, Process, User
from turnstile_server.sandboxes.search_path import search_path
from turnstile_server.settings import SandboxSettings


class ExecSandbox:
    """A ``Sandbox``. ``release`` removes the container; it is called once, by ``destroy``."""

    origin = MADE_AT_ONCE

    def __init__(
        self,
        sandbox_id: str,
        engine: DockerEngine,
        container: str,
        layout: Layout,
        settings: SandboxSettings,
        release: Callable[[], Awaitable[None]],
        tasks: BackgroundTasks,
    ) -> None:
        self._sandbox_id = sandbox_id
        self._engine = engine
        self._container = container
        self._layout = layout
        self._settings = settings
        self._release = release
        self._tasks = tasks
        self._running: set[ExecProcess] = set()
        self._destroying: BackgroundTask[None] | None = None
        self._dead = anyio.Event()
        self._death = SandboxDeath.OUTSIDE

    async def open(self) -> None:
        """Gives the image's files to the agent, where the task works on those. Raises TaskFailed,
        SandboxUnavailable."""
        if self._layout.own_tree:
            agent = self._layout.uids[User.AGENT]
            argv = ["chown", "-R", f"{agent}:{agent}", self._layout.workdir]
            code, said = await self._engine.exec_short(self._container, argv)
            if code != 0:
                raise TaskFailed(f"the image's {self._layout.workdir} cannot be given to the agent: {said}")
        for folder in self._layout.passable:
            argv = ["/bin/sh", "-c", '[ ! -d "$0" ] || chmod go+x "$0"', folder]
            code, said = await self._engine.exec_short(self._container, argv)
            if code != 0:
                raise TaskFailed(f"the image's {folder} cannot be opened to the users of the sandbox: {said}")

    @property
    def sandbox_id(self) -> str:
        return self._sandbox_id

    @property
    def workdir(self) -> str:
        return self._layout.workdir

    @property
    def agent_url(self) -> str | None:
        return None

    @property
    def python(self) -> str:
        return self._layout.python

    @property
    def can_launch(self) -> bool:
        return False

    def admit(self, episode_id: str | None) -> None:
        """No-op: the agent app cannot be reached from inside."""

    def enter_phase(self, phase: NetworkPhase | None, log: NetworkLog | None = None) -> None:
        """No-op: nor can the proxy. The provider makes no such sandbox for a task with a network."""

    async def exec(self, command: Command) -> ExecResult:
        process = await self._begin(command)
        try:
            return await process.wait()
        except anyio.get_cancelled_exc_class():
            await process.kill()
            raise

    async def start(self, command: Command) -> Process:
        process = await self._begin(command)
        await process.begun()
        return process

    async def read(self, path: str, max_bytes: int) -> bytes:
        return await self._file(scripts.READ, path, str(max_bytes + 1), path=path, max_bytes=max_bytes)

    async def write(self, path: str, data: bytes, *, mode: int | None = None, user: User = User.AGENT) -> None:
        if len(data) > (most := self._settings.max_file_bytes):
            raise FileProblem(f"{path}: {len(data)} bytes are more than may be written at once ({most})")
        octal = "" if mode is None else f"{mode:o}"
        await self._file(scripts.WRITE, path, octal, path=path, stdin=data, user=user)

    async def upload(self, archive: bytes, target: str, *, user: User = User.AGENT) -> None:
        if len(archive) > (most := self._settings.max_archive_bytes):
            raise FileProblem(
                f"{target}: an archive of {len(archive)} bytes is larger than may be uploaded ({most})"
            )
        await self._file(scripts.UNPACK, target, path=target, stdin=archive, user=user)

    async def download(self, path: str, max_bytes: int) -> bytes:
        return await self._file(scripts.PACK, path, path=path, max_bytes=max_bytes)

    async def stop_all(self) -> None:
        for process in list(self._running):
            await process.begun()  # the engine may have taken a command and not started it yet
        code, said = await self._as_root(["/bin/sh", "-c", scripts.STOP_ALL])
        if code != 0:
            raise SandboxFailed(f"processes of the sandbox could not be killed: {said}")

    async def died(self) -> SandboxDeath:
        await self._dead.wait()
        return self._death

    async def destroy(self) -> None:
        self._set_dead(SandboxDeath.OUTSIDE)
        if self._destroying is None:
            self._destroying = self._tasks.start(self._destroy, name=f"destroy {self._sandbox_id}")
        await self._destroying.wait()

    async def _destroy(self) -> None:
        for process in list(self._running):
            await process.abandon()
        await self._release()

    async def _begin(self, command: Command) -> ExecProcess:
        if self._destroying is not None:
            raise SandboxFailed.of(SandboxDeath.OUTSIDE, "the sandbox was destroyed")
        env = {
            "PATH": search_path(self._layout.path, self.workdir, command.user),
            "HOME": HOMES[command.user],
            "LANG": "C.UTF-8",
            "TMPDIR": "/tmp",
            **({} if command.user is User.HARNESS else self._layout.environment),
            **command.env,
        }
        uid = self._layout.uids[command.user]
        size = len(command.stdin) if command.stdin and not self._engine.closes_input else None
        argv = wrapped(command.argv, command.cwd or self.workdir, env, size)
        try:
            stream = await self._engine.exec_start(
                self._container, argv, user=f"{uid}:{uid}", cwd="/", stdin=bool(command.stdin)
            )
        except SandboxUnavailable as error:
            await self._notice_death()
            death = self._death if self._dead.is_set() else SandboxDeath.OUTSIDE
            raise SandboxFailed.of(death, error.message) from error
        process = ExecProcess(
            self._engine,
            self._container,
            stream,
            self._tasks,
            stdin=command.stdin,
            max_output_bytes=command.max_output_bytes,
            timeout_s=command.timeout_s,
            grace_s=self._settings.call_timeout_s,
            on_end=self._ended,
        )
        self._running.add(process)
        return process

    def _ended(self, process: ExecProcess) -> None:
        self._running.discard(process)
        if process.death is not None:
            self._set_dead(process.death)

    async def _notice_death(self) -> None:
        """Notes that the container no longer runs. Where the engine does not answer, it is taken to run."""
        try:
            state = await self._engine.state(self._container)
        except SandboxUnavailable:
            return
        if state is None or not state.running:
            self._set_dead(SandboxDeath.OUTSIDE if state is None else state.death)

    def _set_dead(self, death: SandboxDeath) -> None:
        """The first death counts."""
        if not self._dead.is_set():
            self._death = death
            self._dead.set()

    async def _file(
        self,
        script: str,
        *arguments: str,
        path: str,
        max_bytes: int | None = None,
        stdin: bytes = b"",
        user: User = User.AGENT,
    ) -> bytes:
        """Raises FileProblem, SandboxFailed."""
        if "\0" in path or not path.startswith("/"):
            raise FileProblem(f"{path}: not an absolute path")
        result = await self.exec(
            Command(
                ("/bin/sh", "-c", script, "sh", *arguments),
                cwd="/",
                user=user,
                timeout_s=self._settings.call_timeout_s,
                max_output_bytes=max(max_bytes or 0, scripts.MAX_ERROR_BYTES),
                stdin=stdin,
            )
        )
        if result.timed_out:
            raise FileProblem(f"{path}: took longer than {self._settings.call_timeout_s:g} s")
        if result.exit_code != 0:
            said = result.stderr.decode(errors="replace").strip()
            raise FileProblem(f"{path}: {said or f'exit code {result.exit_code}'}")
        if max_bytes is not None and (result.dropped_bytes or len(result.stdout) > max_bytes):
            raise FileProblem(f"{path}: it has more than the {max_bytes} bytes that may be fetched")
        return result.stdout

    async def _as_root(self, argv: list[str]) -> tuple[int, str]:
        try:
            return await self._engine.exec_short(self._container, argv)
        except SandboxUnavailable as error:
            raise SandboxFailed.of(SandboxDeath.OUTSIDE, error.message) from error
