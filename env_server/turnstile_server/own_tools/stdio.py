"""A mounted MCP server that is a command: its process, and the streams that the MCP client speaks over.

Like the SDK's own ``stdio_client``, but for servers that are not trusted to behave: lines are bounded, garbage and
floods are counted, standard error is kept, the environment is what was said and nothing else, and at the end the
whole process group is killed, also where its leader left by itself. Wire format: one JSON-RPC message a line
(https://modelcontextprotocol.io/specification/2025-11-25/basic/transports#stdio).
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import signal
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from subprocess import PIPE

import anyio
import mcp_types as mcp
from anyio.abc import ByteReceiveStream, ObjectReceiveStream, ObjectSendStream, Process
from mcp.client._transport import TransportStreams
from mcp.shared.message import SessionMessage
from pydantic import ValidationError

from turnstile_server.child_processes import start_process
from turnstile_server.own_tools.bounds import OwnToolBounds
from turnstile_server.own_tools.server_link import Flooded, ServerLink
from turnstile_server.settings import ToolSettings
from turnstile_server.settings.own_tools import ServerSpec

_READ_BYTES = 64 << 10
_ENVELOPE_BYTES = 4096
"""Room in a line for what is around a result."""
_EXIT_S = 0.3
_WAITING_MESSAGES = 16
"""Messages to a server that does not read at once: above all, that a call is cancelled."""
_EDGE_BYTES = 256
_ID = re.compile(rb'"id"\s*:\s*(\d+|"[^"\\]{1,64}")\s*[,}]')


_DIE_WITH_PARENT = """\
import ctypes, os, sys
ctypes.CDLL(None).prctl(1, 9)
os.getppid() == int(sys.argv[1]) or os._exit(1)
os.execv(sys.argv[2], sys.argv[2:])
"""
"""PR_SET_PDEATHSIG: a server that does not mind the end of its input goes with Turnstile, also when that is
killed."""


def _launcher() -> tuple[str, ...]:
    """The launcher that stands before the command; only Linux has it."""
    here = (sys.executable, "-I", "-S", "-c", _DIE_WITH_PARENT, str(os.getpid()))
    return here if sys.platform == "linux" else ()


class MissingVariable(Exception):
    """``env`` or ``headers`` name a variable that the server's environment has not."""


def variable(name: str) -> str:
    """A variable of the server's own environment. Raises MissingVariable."""
    if name not in os.environ:
        raise MissingVariable(f"the environment variable {name} is not set where Turnstile runs")
    return os.environ[name]


def environment(spec: ServerSpec) -> Mapping[str, str]:
    """PATH, and what ``env`` lists. Raises MissingVariable."""
    path = os.environ.get("PATH", os.defpath)
    return {
        "PATH": path,
        **{
            name: value if given else variable(name)
            for name, given, value in (entry.partition("=") for entry in spec.env)
        },
    }


def _program(command: str, path: str, cwd: Path | None) -> str:
    """The file of a command, found as the shell would find it. Raises FileNotFoundError."""
    found = shutil.which(str((cwd or Path.cwd()) / command) if "/" in command else command, path=path)
    if found is None:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), command)
    return found


@asynccontextmanager
async def stdio_streams(
    spec: ServerSpec, settings: ToolSettings, link: ServerLink
) -> AsyncIterator[TransportStreams]:
    """Starts the command; leaving the block ends it. Raises OSError where it cannot be started."""
    assert spec.command is not None
    env = environment(spec)
    process = await start_process(
        [*_launcher(), _program(spec.command, env["PATH"], spec.cwd), *spec.args],
        env=env,
        cwd=spec.cwd,
        stdin=PIPE,
        stdout=PIPE,
        stderr=PIPE,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    to_session, from_server = anyio.create_memory_object_stream[SessionMessage | Exception](0)
    to_server, from_session = anyio.create_memory_object_stream[SessionMessage](_WAITING_MESSAGES)
    reader = _Reader(process, to_session, settings.own_max_result_bytes + _ENVELOPE_BYTES, link)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(reader.run, process.stdout)
        tasks.start_soon(_write, process, from_session, settings.bounds_of(OwnToolBounds).mount_send_s, link)
        tasks.start_soon(_keep_stderr, process.stderr, link)
        try:
            yield from_server, to_server
        finally:
            link.ending = True
            with anyio.CancelScope(shield=True):
                from_server.close()  # from now on the reader only drains, so that the server can write its last
                to_server.close()
                await _end(process, settings.bounds_of(OwnToolBounds).mount_grace_s)
            tasks.cancel_scope.cancel()


class _Reader:
    """Turns the server's standard output into messages; ends the connection where it ends, or floods."""

    def __init__(
        self,
        process: Process,
        session: ObjectSendStream[SessionMessage | Exception],
        most: int,
        link: ServerLink,
    ) -> None:
        self._process = process
        self._session = session
        self._most = most
        self._link = link
        self._line = bytearray()
        self._skipped = b""
        """The beginning of a line that is too long to be kept; empty where the line is kept."""

    async def run(self, stdout: ByteReceiveStream) -> None:
        async with self._session:
            try:
                while True:
                    await self._take(await stdout.receive(_READ_BYTES))
            except (anyio.EndOfStream, anyio.BrokenResourceError, anyio.ClosedResourceError):
                how = await self._exit()
                if not self._link.ending:
                    self._link.lose(how)
            except Flooded as error:
                self._link.lose(str(error))
                kill_group(self._process)

    async def _exit(self) -> str:
        """The end of the process, in words; its output ends a moment before it."""
        with anyio.move_on_after(_EXIT_S):
            await self._process.wait()
        code = self._process.returncode
        return "it closed its output" if code is None else f"it ended with exit code {code}"

    async def _take(self, data: bytes) -> None:
        *ended, rest = data.split(b"\n")
        for part in ended:
            self._add(part)
            await self._end_line()
        self._add(rest)

    def _add(self, part: bytes) -> None:
        self._line += part
        if self._skipped:
            self._link.discarded(len(part))
            del self._line[:-_EDGE_BYTES]
        elif len(self._line) > self._most:
            self._link.discarded(len(self._line))
            self._skipped = bytes(self._line[:_EDGE_BYTES])
            del self._line[:-_EDGE_BYTES]

    async def _end_line(self) -> None:
        line, self._line = bytes(self._line), bytearray()
        skipped, self._skipped = self._skipped, b""
        message = self._too_large(skipped, line) if skipped else self._parsed(line)
        if message is None:
            return
        if isinstance(message, mcp.JSONRPCResponse | mcp.JSONRPCError):
            if not self._link.answered(message.id):
                self._link.discarded(len(line))
                return
        else:
            self._link.notified()
        with contextlib.suppress(anyio.BrokenResourceError):  # the session has ended: drain
            await self._session.send(SessionMessage(message))

    def _parsed(self, line: bytes) -> mcp.JSONRPCMessage | None:
        if not line.strip():
            return None
        try:
            return mcp.jsonrpc_message_adapter.validate_json(line, by_name=False)
        except ValidationError:
            self._link.discarded(len(line))
            return None

    def _too_large(self, head: bytes, tail: bytes) -> mcp.JSONRPCMessage | None:
        """The call whose answer was too large gets an error instead. Servers write the id first or last."""
        last = list(_ID.finditer(tail))
        found = last[-1] if last and tail.rstrip().endswith(b"}") else _ID.search(head)
        if found is None:
            return None
        text = found[1].decode()
        said = f"the result has more than {self._most - _ENVELOPE_BYTES} bytes (tools.own_max_result_bytes)"
        error = mcp.ErrorData(code=mcp.INTERNAL_ERROR, message=said)
        request_id = text.strip('"') if text.startswith('"') else int(text)
        return mcp.JSONRPCError(jsonrpc="2.0", id=request_id, error=error)


async def _write(
    process: Process, messages: ObjectReceiveStream[SessionMessage], send_s: float, link: ServerLink
) -> None:
    """Ends with the session, or with the process: the reader then says why. A server that reads no more is cut off
    after ``send_s``."""
    assert process.stdin is not None
    async with messages:
        with contextlib.suppress(anyio.BrokenResourceError, anyio.ClosedResourceError, ConnectionError):
            async for message in messages:
                if isinstance(message.message, mcp.JSONRPCRequest):
                    link.asked(message.message.id)
                line = message.message.model_dump_json(by_alias=True, exclude_unset=True)
                with anyio.move_on_after(send_s) as sending:
                    await process.stdin.send(line.encode() + b"\n")
                if sending.cancelled_caught:
                    link.lose(f"it took no input for {send_s:g} s")
                    kill_group(process)
                    return


async def _keep_stderr(stderr: ByteReceiveStream, link: ServerLink) -> None:
    line = b""
    with contextlib.suppress(anyio.EndOfStream, anyio.BrokenResourceError, anyio.ClosedResourceError):
        while True:
            *ended, rest = (line + await stderr.receive(_READ_BYTES)).split(b"\n")
            for text in ended:
                link.stderr_line(text.decode(errors="replace"))
            line = rest[:_READ_BYTES]
    link.stderr_line(line.decode(errors="replace"))


async def _end(process: Process, grace_s: float) -> None:
    """The order of the specification: close its input, wait, SIGTERM, wait, SIGKILL. The kill comes always,
    because a leader that left by itself may leave children."""
    assert process.stdin is not None
    with contextlib.suppress(anyio.BrokenResourceError, anyio.ClosedResourceError, OSError):
        await process.stdin.aclose()
    if not await _ended(process, grace_s):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        await _ended(process, grace_s)
    kill_group(process)
    await _ended(process, grace_s)
    with anyio.move_on_after(grace_s):
        await process.aclose()


async def _ended(process: Process, seconds: float) -> bool:
    with anyio.move_on_after(seconds):
        await process.wait()
    return process.returncode is not None


def kill_group(process: Process) -> None:
    """Kills what is left of the process's group; its id is not used again while one of it lives."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
