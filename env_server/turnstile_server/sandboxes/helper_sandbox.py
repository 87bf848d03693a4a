"""A sandbox with a helper inside: the ``Sandbox`` protocol over a helper client, whichever backend runs the
helper.

Owns the client and the link from ``open`` on. ``destroy`` ends both, with the backend's own clean-up: once,
however often and by whom it is called, and whether or not the caller waits.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import anyio

from turnstile_server.egress.log import NetworkLog
from turnstile_server.egress.policy import NetworkPhase
from turnstile_server.errors import FileProblem, SandboxDeath, SandboxFailed, SandboxUnavailable
from turnstile_server.sandboxes import call_filter
from turnstile_server.sandboxes.background import BackgroundTask, BackgroundTasks
from turnstile_server.sandboxes.helper.turnstile_helper import frames
from turnstile_server.sandboxes.helper_client import HelperClient, HelperReply, HelperRequest
from turnstile_server.sandboxes.link import SandboxLink
from turnstile_server.sandboxes.protocol import (
    HOMES,
    IMAGE_PYTHON,
    MADE_AT_ONCE,
    WORKDIR,
    Command,
    ExecResult,
    Process,
    SandboxOrigin,
    User,
)
from turnstile_server.sandboxes.search_path import search_path
from turnstile_server.settings import Bounds, SandboxSettings

FORWARD_PORT, NETWORK_PORT = 8001, 8002
_MOST_FORWARDED = 128
"""Connections that the helper forwards at once. Each takes one or two of its descriptors: an agent that opens more
may not use up those that commands need."""
_MAX_ERROR_BYTES = 8192
"""Room for the error text of a file operation."""


@dataclass(frozen=True)
class SandboxBounds(Bounds):
    """Bounds that nobody has asked to change."""

    output_grace_s: float = 0.25
    """Seconds for the child processes of a command that has ended to close its output; then they are killed."""
    terminals: int = 16
    """Pseudo-terminals of a sandbox, or of each of its users where they have one uid, where the helper mounts
    them: the whole machine has some thousand."""
    inotify_instances: int = 16
    """Watchers of files in a sandbox with a user name space. The kernel counts those of the server and of all its
    sandboxes together, and allows 128 on most machines (``fs.inotify.max_user_instances``)."""
    inotify_watches: int = 16_384
    """The same for what they watch (``fs.inotify.max_user_watches``)."""


@dataclass(frozen=True, slots=True)
class Layout:
    """The layout in which the helper sets the sandbox up (``helper/turnstile_helper/setup.py``)."""

    workdir: str = WORKDIR
    path: str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    """PATH of commands."""
    homes: Mapping[User, str] = field(default_factory=lambda: dict(HOMES))
    """Made if they are missing, where /home can be written to."""
    python: str = IMAGE_PYTHON
    """The interpreter that the helper runs on, and the server's other programs."""
    temporary: str = "/tmp"
    """TMPDIR of commands; made if it is missing."""
    uids: Mapping[User, int] = field(default_factory=dict)
    """The uid of each user's commands, where the helper can change its own. Empty: one uid for all."""
    compartments: bool = False
    """Keep users apart by name spaces where there is one uid (``helper/turnstile_helper/compartments.py``). Needs
    capabilities of the helper in a user name space, which are tried beforehand."""
    marks: Mapping[str, str] = field(default_factory=dict)
    """Environment variables of every command, by which the backend finds the sandbox's processes again."""
    own_processes: bool = True
    """The sandbox has a process name space of its own, so everything in it may be killed."""
    own_tree: bool = False
    """Give the work folder's contents to the agent (files of an image are root's). Needs CAP_CHOWN."""
    passable: Sequence[str] = ()
    """Folders of root's that every user may pass through. One that is not there is left out."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables of every command but the harness's."""
    rlimits: Mapping[str, int] = field(default_factory=dict)
    """Resource limits of each command: name without ``RLIMIT_`` to value."""
    disk: Mapping[str, object] | None = None
    """What can be written, where the helper mounts it (``mount_disk`` of ``turnstile_helper/disk.py``)."""
    filtered: bool = True
    """Commands have only the system calls of ``call_filter``. False: no isolation."""
    forward_port: int | None = FORWARD_PORT
    """Port of the sandbox's loopback that is forwarded to the agent endpoint; 0 takes a free one, None none."""
    network_port: int = NETWORK_PORT
    """The same to the server's proxy, where the sandbox may reach hosts; 0 takes a free one."""


class HelperSandbox:
    """A ``Sandbox``. ``release``: the backend's own clean-up, which kills and removes what runs the helper. It is
    called once, by ``destroy``, after the client is closed and before the link is. It may not raise for what
    is gone already. ``diagnose``: what ended the sandbox, from what the backend sees of it from outside; asked
    once, when the connection has ended."""

    origin: SandboxOrigin = MADE_AT_ONCE

    def __init__(
        self,
        sandbox_id: str,
        client: HelperClient,
        link: SandboxLink,
        layout: Layout,
        settings: SandboxSettings,
        release: Callable[[], Awaitable[None]],
        tasks: BackgroundTasks,
        diagnose: Callable[[], Awaitable[SandboxDeath]] | None = None,
    ) -> None:
        self._sandbox_id = sandbox_id
        self._client = client
        client.diagnose = diagnose
        self._link = link
        self._layout = layout
        self._settings = settings
        self._release = release
        self._tasks = tasks
        self._agent_url: str | None = None
        self._network_port = 0
        self._destroying: BackgroundTask[None] | None = None
        self.own_uids = False
        """True if each user really has the uid that the layout gives it."""
        self.compartments = False
        """True if users are kept apart by name spaces, where they are not by uids."""
        self.filtered = False
        """True if the helper takes capabilities and system calls from every command."""

    async def open(self) -> None:
        """Sets the sandbox up. Raises SandboxUnavailable; the caller calls ``destroy`` then too."""
        layout, bounds = self._layout, self._settings.bounds_of(SandboxBounds)
        try:
            reply = await self._client.call(
                {
                    "op": "setup",
                    "workdir": layout.workdir,
                    "uids": dict(layout.uids),
                    "homes": dict(layout.homes),
                    "env": {
                        "PATH": layout.path,
                        "LANG": "C.UTF-8",
                        "TMPDIR": layout.temporary,
                        **layout.marks,
                    },
                    "task_env": dict(layout.environment),
                    "compartments": layout.compartments,
                    "own_processes": layout.own_processes,
                    "own_tree": layout.own_tree,
                    "passable": list(layout.passable),
                    "disk": layout.disk,
                    "rlimits": {**layout.rlimits, "NOFILE": self._settings.open_files},
                    "terminals": bounds.terminals,
                    "inotify": [bounds.inotify_instances, bounds.inotify_watches],
                    "filter": b64encode(call_filter.program()).decode() if layout.filtered else None,
                    "grace_s": bounds.output_grace_s,
                    "forward": self._forward(
                        layout.forward_port, self._link.gate_inside, self._settings.max_connections
                    ),
                    "network": None
                    if self._link.network is None
                    else self._forward(layout.network_port, self._link.network_inside, self._link.network.most),
                },
                timeout_s=self._settings.start_timeout_s,
            )
        except SandboxFailed as error:
            raise SandboxUnavailable(f"a sandbox could not be set up: {error.message}") from error
        self.own_uids = bool(reply.fields.get("own_uids"))
        self.compartments = bool(reply.fields.get("compartments"))
        self.filtered = bool(reply.fields.get("filtered"))
        port = reply.fields.get("port")
        self._agent_url = None if port is None else f"http://127.0.0.1:{int(port)}"
        self._network_port = int(reply.fields.get("network_port") or 0)

    def _forward(self, port: int | None, path: str, most: int) -> dict[str, Any] | None:
        """A port of the loopback that the helper forwards to a socket."""
        if port is None:
            return None
        most = min(_MOST_FORWARDED, most)
        return {"port": port, "socket": path, "carried": self._link.carried, "connections": most}

    @property
    def users_apart(self) -> bool:
        """True if a command can reach no process and no private file of another user."""
        return self.own_uids or self.compartments

    @property
    def sandbox_id(self) -> str:
        return self._sandbox_id

    @property
    def workdir(self) -> str:
        return self._layout.workdir

    @property
    def agent_url(self) -> str | None:
        return self._agent_url

    @property
    def destroyed(self) -> bool:
        """True if ``destroy`` was called."""
        return self._destroying is not None

    @property
    def lost(self) -> anyio.Event:
        """Set when the sandbox has died or was destroyed."""
        return self._client.lost

    @property
    def python(self) -> str:
        return self._layout.python

    @property
    def can_launch(self) -> bool:
        return True

    def admit(self, episode_id: str | None) -> None:
        self._link.admit(episode_id)

    def enter_phase(self, phase: NetworkPhase | None, log: NetworkLog | None = None) -> None:
        if self._link.network is not None:
            self._link.network.enter(phase, log)

    async def exec(self, command: Command) -> ExecResult:
        try:
            reply = await self._client.call(
                self._header(command),
                data=command.stdin,
                max_output=command.max_output_bytes,
                timeout_s=self._reply_timeout(command.timeout_s),
                on_line=command.on_line,
                streams=command.streams,
            )
        except frames.FrameError:
            return _too_long(command)
        return _result(reply)

    async def start(self, command: Command) -> Process:
        await self._client.settled()
        try:
            request = self._client.begin_detached(
                self._header(command),
                data=command.stdin,
                max_output=command.max_output_bytes,
                timeout_s=self._reply_timeout(command.timeout_s),
                on_line=command.on_line,
            )
        except frames.FrameError:
            return _FailedStart(_too_long(command))
        return _DetachedCommand(request)

    async def read(self, path: str, max_bytes: int) -> bytes:
        return (await self._file("read", path, max_bytes=max_bytes)).stdout

    async def write(self, path: str, data: bytes, *, mode: int | None = None, user: User = User.AGENT) -> None:
        if len(data) > self._settings.max_file_bytes:
            raise FileProblem(
                f"{path}: {len(data)} bytes are more than may be written at once ({self._settings.max_file_bytes})"
            )
        await self._file("write", path, data=data, mode=mode, user=user)

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
        reply = await self._client.call({"op": "stop_all"}, timeout_s=self._settings.call_timeout_s)
        if reply.fields.get("left"):
            self._client.lose("processes of the sandbox could not be killed")
            raise SandboxFailed("processes of the sandbox could not be killed")

    async def died(self) -> SandboxDeath:
        await self._client.lost.wait()
        return self._client.death

    async def destroy(self) -> None:
        if self._destroying is None:
            self._destroying = self._tasks.start(self._destroy, name=f"destroy {self._sandbox_id}")
        await self._destroying.wait()

    async def _destroy(self) -> None:
        self._link.admit(None)
        self.enter_phase(None)
        try:
            await self._client.close()
        finally:
            try:
                await self._release()
            finally:
                await self._link.close()

    def _header(self, command: Command) -> dict[str, Any]:
        layout, network = self._layout, self._link.network
        path = search_path(layout.path, layout.workdir, command.user)
        header = {
            "op": "run",
            "argv": list(command.argv),
            "cwd": command.cwd,
            "env": {**({} if path == layout.path else {"PATH": path}), **command.env},
            "user": command.user,
            "timeout_s": command.timeout_s,
            "max_output": command.max_output_bytes,
        }
        if network is not None and (proxy := network.environment(self._network_port)):
            header["network"] = dict(proxy)
        if command.launches is not None:
            header["launches"] = command.launches
        if command.streams is not None:
            header["passed"] = True
        return header if command.on_line is None else {**header, "line_s": command.line_s}

    def _reply_timeout(self, timeout_s: float | None) -> float | None:
        """Seconds that the helper may take to reply to a command that may run for ``timeout_s``."""
        if timeout_s is None:
            return None
        return timeout_s + self._settings.bounds_of(SandboxBounds).output_grace_s + self._settings.call_timeout_s

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
            reply = await self._client.call(
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
                max_output=max(max_bytes, _MAX_ERROR_BYTES),
                timeout_s=self._reply_timeout(self._settings.call_timeout_s),
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


class _DetachedCommand:
    """A ``Process``: a command that runs on its own. The sandbox owns it, so a waiter that gives up leaves it."""

    def __init__(self, request: HelperRequest) -> None:
        self._request = request

    async def wait(self) -> ExecResult:
        await self._request.ended.wait()
        return _result(self._request.result())

    async def kill(self) -> None:
        self._request.kill()


class _FailedStart:
    """A ``Process`` that could not be started."""

    def __init__(self, result: ExecResult) -> None:
        self._result = result

    async def wait(self) -> ExecResult:
        return self._result

    async def kill(self) -> None:
        return


def _result(reply: HelperReply) -> ExecResult:
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
    """The result that a shell gives for a command line that is too long for the system (E2BIG)."""
    sentence = f"cannot run {command.argv[0]}: argument list too long\n"
    return ExecResult(126, b"", sentence.encode(), 0, False, 0.0)
