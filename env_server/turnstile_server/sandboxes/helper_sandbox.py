"""A sandbox that a helper serves: the ``Sandbox`` protocol over a link, whatever backend runs the helper.

Owns the link and the door from ``open`` on, and ends both, with the backend's own clean-up, in ``destroy``: once,
whoever calls it, how often, and whether or not they wait.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from turnstile_server.errors import FileProblem, SandboxFailed, SandboxUnavailable
from turnstile_server.sandboxes.helper.turnstile_helper import frames
from turnstile_server.sandboxes.helper_client import HelperLink, Reply, Request
from turnstile_server.sandboxes.protocol import WORKDIR, Command, ExecResult, Process, User
from turnstile_server.sandboxes.sockets import SandboxSockets
from turnstile_server.settings import SandboxSettings

FORWARD_PORT = 8001
_MAX_COMPLAINT = 8192


@dataclass(frozen=True, slots=True)
class Layout:
    """What a backend tells its helper, once (``helper/turnstile_helper/setup.py``)."""

    workdir: str = WORKDIR
    path: str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    """PATH of commands."""
    homes: Mapping[User, str] = field(
        default_factory=lambda: {User.AGENT: "/home/agent", User.TESTS: "/home/tests"}
    )
    """Made if they are not there; where that must be possible (a writable /home)."""
    temporary: str = "/tmp"
    """TMPDIR of commands; made if it is not there."""
    change_users: bool = True
    """Run commands under the agent's and the tests' uids, where the helper can."""
    marks: Mapping[str, str] = field(default_factory=dict)
    """Environment variables of every command, by which the backend finds its processes again."""
    own_processes: bool = True
    """The sandbox has a process name space of its own, so that everything in it may be killed."""
    own_tree: bool = False
    """Give the work folder's contents to the agent (files of an image are root's). Needs CAP_CHOWN."""
    rlimits: Mapping[str, int] = field(default_factory=dict)
    """Bounds that each command gets: resource name without ``RLIMIT_`` to its value."""
    forward_port: int | None = FORWARD_PORT
    """Port on the sandbox's loopback that leads to the agent door; 0 takes a free one, None forwards nothing."""


class HelperSandbox:
    """``release``: the backend's own clean-up (kill and remove what runs the helper); called once, by ``destroy``,
    after the link has ended and before the door is closed. It may not raise for what is gone already."""

    def __init__(
        self,
        sandbox_id: str,
        link: HelperLink,
        door: SandboxSockets,
        layout: Layout,
        settings: SandboxSettings,
        release: Callable[[], Awaitable[None]],
    ) -> None:
        self._sandbox_id = sandbox_id
        self._link = link
        self._door = door
        self._layout = layout
        self._settings = settings
        self._release = release
        self._agent_door: str | None = None
        self._destroying: asyncio.Task[None] | None = None
        self.two_users = False
        """Whether the agent's and the tests' uids really differ."""

    async def open(self) -> None:
        """Sets the inside up. Raises SandboxUnavailable; then ``destroy`` is still the caller's to call."""
        layout = self._layout
        uids = (
            {}
            if not layout.change_users
            else {User.AGENT: self._settings.agent_uid, User.TESTS: self._settings.tests_uid}
        )
        try:
            reply = await self._link.call(
                {
                    "op": "setup",
                    "workdir": layout.workdir,
                    "uids": uids,
                    "homes": dict(layout.homes),
                    "env": {
                        "PATH": layout.path,
                        "LANG": "C.UTF-8",
                        "TMPDIR": layout.temporary,
                        **layout.marks,
                    },
                    "own_processes": layout.own_processes,
                    "own_tree": layout.own_tree,
                    "rlimits": dict(layout.rlimits),
                    "grace_s": self._settings.output_grace_s,
                    "forward": None
                    if layout.forward_port is None
                    else [layout.forward_port, self._door.gate_inside],
                },
                timeout_s=self._settings.start_timeout_s,
            )
        except SandboxFailed as error:
            raise SandboxUnavailable(f"a sandbox could not be set up: {error.message}") from error
        self.two_users = bool(reply.fields.get("two_users"))
        port = reply.fields.get("port")
        self._agent_door = None if port is None else f"http://127.0.0.1:{int(port)}"

    @property
    def sandbox_id(self) -> str:
        return self._sandbox_id

    @property
    def workdir(self) -> str:
        return self._layout.workdir

    @property
    def agent_url(self) -> str | None:
        return self._agent_door

    @property
    def destroyed(self) -> bool:
        """Whether ``destroy`` was called."""
        return self._destroying is not None

    @property
    def lost(self) -> asyncio.Event:
        """Set when the sandbox has died or was destroyed."""
        return self._link.lost

    def admit(self, episode_id: str | None) -> None:
        self._door.admit(episode_id)

    async def exec(self, command: Command) -> ExecResult:
        try:
            reply = await self._link.call(
                _run(command),
                data=command.stdin,
                max_output=command.max_output_bytes,
                timeout_s=self._patience(command.timeout_s),
            )
        except frames.FrameError:
            return _too_long(command)
        return _result(reply)

    async def start(self, command: Command) -> Process:
        try:
            request = self._link.begin(
                {**_run(command), "stdin_size": len(command.stdin)}, max_output=command.max_output_bytes
            )
        except frames.FrameError:
            return _Ended(_too_long(command))
        request.give_up_after(self._patience(command.timeout_s))
        return _Started(request, command.stdin)

    async def read(self, path: str, max_bytes: int) -> bytes:
        return (await self._file("read", path, max_bytes=max_bytes)).stdout

    async def write(self, path: str, data: bytes, *, mode: int | None = None) -> None:
        if len(data) > self._settings.max_file_bytes:
            raise FileProblem(
                f"{path}: {len(data)} bytes are more than may be written at once ({self._settings.max_file_bytes})"
            )
        await self._file("write", path, data=data, mode=mode)

    async def upload(self, archive: bytes, target: str, *, user: User = User.AGENT) -> None:
        if len(archive) > self._settings.max_archive_bytes:
            raise FileProblem(
                f"{target}: an archive of {len(archive)} bytes is larger than may be uploaded "
                f"({self._settings.max_archive_bytes})"
            )
        await self._file("unpack", target, data=archive, user=user)

    async def download(self, path: str, max_bytes: int) -> bytes:
        return (await self._file("pack", path, max_bytes=max_bytes)).stdout

    async def stop_all(self) -> None:
        reply = await self._link.call({"op": "stop_all"}, timeout_s=self._settings.call_timeout_s)
        if reply.fields.get("left"):
            self._link.lose("processes of the sandbox could not be killed")
            raise SandboxFailed("processes of the sandbox could not be killed")

    async def died(self) -> None:
        await self._link.lost.wait()

    async def destroy(self) -> None:
        if self._destroying is None:
            self._destroying = asyncio.create_task(self._destroy(), name=f"destroy {self._sandbox_id}")
        await asyncio.shield(self._destroying)

    async def _destroy(self) -> None:
        self._door.admit(None)
        try:
            await self._link.close()
        finally:
            try:
                await self._release()
            finally:
                await self._door.close()

    def _patience(self, timeout_s: float | None) -> float | None:
        """How long the helper may be silent about a command that is given ``timeout_s``."""
        if timeout_s is None:
            return None
        return timeout_s + self._settings.output_grace_s + self._settings.call_timeout_s

    async def _file(
        self,
        action: str,
        path: str,
        *,
        data: bytes = b"",
        user: User = User.AGENT,
        max_bytes: int = 0,
        mode: int | None = None,
    ) -> ExecResult:
        """Raises FileProblem, SandboxFailed."""
        try:
            reply = await self._link.call(
                {
                    "op": "file",
                    "action": action,
                    "path": path,
                    "user": user,
                    "max_bytes": max_bytes,
                    "mode": mode,
                    "timeout_s": self._settings.call_timeout_s,
                },
                data=data,
                max_output=max(max_bytes, _MAX_COMPLAINT),
                timeout_s=self._patience(self._settings.call_timeout_s),
            )
        except frames.FrameError as error:
            raise FileProblem(f"{path[:100]}…: the path is too long") from error
        done = _result(reply)
        if done.exit_code == frames.FILE_PROBLEM:
            raise FileProblem(done.stderr.decode(errors="replace"))
        if done.timed_out:
            raise FileProblem(f"{path}: took longer than {self._settings.call_timeout_s:g} s")
        if done.exit_code != 0:
            raise FileProblem(f"{path}: the operation was stopped (exit code {done.exit_code})")
        return done


class _Started:
    """A detached command. Its standard input is sent by a task of its own, which ends with the command."""

    def __init__(self, request: Request, stdin: bytes) -> None:
        self._request = request
        self._sending = asyncio.create_task(request.send_input(stdin)) if stdin else None

    async def wait(self) -> ExecResult:
        # A waiter that gives up leaves the command running: the sandbox owns it.
        return _result(await asyncio.shield(self._request.future))

    async def kill(self) -> None:
        self._request.kill()


class _Ended:
    """A command that could not be begun."""

    def __init__(self, result: ExecResult) -> None:
        self._result = result

    async def wait(self) -> ExecResult:
        return self._result

    async def kill(self) -> None:
        return


def _run(command: Command) -> dict[str, Any]:
    return {
        "op": "run",
        "argv": list(command.argv),
        "cwd": command.cwd,
        "env": dict(command.env),
        "user": command.user,
        "timeout_s": command.timeout_s,
        "max_output": command.max_output_bytes,
    }


def _result(reply: Reply) -> ExecResult:
    fields = reply.fields
    if "error" in fields:
        raise SandboxFailed(f"the sandbox's helper failed: {fields['error']}")
    try:
        return ExecResult(
            exit_code=int(fields["exit_code"]),
            stdout=reply.stdout,
            stderr=reply.stderr,
            dropped_bytes=int(fields["dropped"]),
            timed_out=bool(fields["timed_out"]),
            duration_s=float(fields["duration_s"]),
        )
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise SandboxFailed(f"the sandbox's helper broke the protocol: {error}") from error


def _too_long(command: Command) -> ExecResult:
    """What a shell says of a command line that the system does not take (E2BIG)."""
    sentence = f"cannot run {command.argv[0]}: argument list too long\n"
    return ExecResult(126, b"", sentence.encode(), 0, False, 0.0)
