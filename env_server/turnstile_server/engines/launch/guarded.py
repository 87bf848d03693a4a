"""One start of an engine below its guardian, for the server: start, wait, stop, and nothing left.

Owns the guardian's process and its pipes (``guardian.py`` says what they carry). What must hold: ``close`` returns
when no process of the engine is left, or says which wait has run out; a guardian that is killed leaves nothing
either: its session is searched then.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from subprocess import PIPE
from typing import Final

import anyio
import orjson
from anyio.abc import Process
from anyio.streams.buffered import BufferedByteReceiveStream

from turnstile_server.child_processes import send_signal, start_process
from turnstile_server.engines.child_log import ChildLog
from turnstile_server.engines.launch.bounds import LaunchBounds
from turnstile_server.engines.launch.command import LaunchCommand
from turnstile_server.errors import StartupError
from turnstile_server.settings import LaunchSettings

log = logging.getLogger(__name__)

GUARDIAN: Final = Path(__file__).with_name("guardian.py")
STATUS_BYTES: Final = 1 << 16
"""Longest line of the guardian."""


@dataclass(frozen=True, slots=True)
class EngineExit:
    """The end of an engine's process. ``code``: minus the signal's number for a signal; None: its guardian was
    killed, and the engine with it."""

    code: int | None

    def __str__(self) -> str:
        if self.code is None:
            return "its guardian was killed, and the engine with it"
        if self.code < 0:
            with suppress(ValueError):
                return f"its process was ended by {signal.Signals(-self.code).name}"
        return f"its process ended with code {self.code}"


class GuardedProcess:
    """An engine that runs. Made by ``start_guarded``; ``close`` must follow."""

    def __init__(self, guardian: Process, pid: int, status: BufferedByteReceiveStream, settings: LaunchSettings):
        self.pid = pid
        """The engine's own."""
        self._guardian = guardian
        self._status = status
        self._settings = settings
        self._bounds = settings.bounds_of(LaunchBounds)

    @property
    def guardian_pid(self) -> int:
        return self._guardian.pid

    async def exit(self) -> EngineExit:
        """Waits until the engine's own process has ended; others of it may be left until ``close``."""
        try:
            message = orjson.loads(await self._status.receive_until(b"\n", STATUS_BYTES))
        except (anyio.IncompleteRead, anyio.EndOfStream, anyio.BrokenResourceError):
            return EngineExit(None)
        return EngineExit(int(message["exit"]))

    async def kill(self) -> None:
        """SIGKILL for the engine and all its processes; ``exit`` returns then."""
        await self._tell(b"kill\n")

    async def close(self) -> None:
        """Ends what is left of the engine: SIGTERM, after ``stop_grace_s`` SIGKILL. Not cut off by a cancellation.

        No-op where nothing is left.
        """
        with anyio.CancelScope(shield=True):
            await self._tell(b"stop\n")
            with anyio.move_on_after(self._settings.stop_grace_s + self._bounds.kill_wait_s):
                await self._guardian.wait()
            if self._guardian.returncode is None:
                log.error(
                    "processes of the engine %d are left: they did not end within %g s of SIGKILL",
                    self.pid,
                    self._bounds.kill_wait_s,
                )
                send_signal(self._guardian, signal.SIGKILL)
                await self._guardian.wait()
            if self._guardian.returncode != 0:
                kill_session(self._guardian.pid)
            await self._guardian.aclose()

    async def _tell(self, word: bytes) -> None:
        if self._guardian.stdin is not None:
            with suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):
                await self._guardian.stdin.send(word)


async def start_guarded(command: LaunchCommand, settings: LaunchSettings, child_log: ChildLog) -> GuardedProcess:
    """Starts the engine below a new guardian. Raises StartupError where its program cannot be started."""
    argv = [sys.executable, "-I", "-S", str(GUARDIAN), str(settings.stop_grace_s), *command.argv]
    try:
        with child_log.writing() as writing:
            guardian = await start_process(argv, env=command.environment, stdin=PIPE, stdout=PIPE, stderr=writing)
    except OSError as error:
        raise StartupError(f"The engine's guardian cannot be started: {error}") from error
    if guardian.stdout is None:
        raise RuntimeError("the guardian has no stdout")
    status = BufferedByteReceiveStream(guardian.stdout)
    process = GuardedProcess(guardian, 0, status, settings)
    try:
        message = orjson.loads(await status.receive_until(b"\n", STATUS_BYTES))
    except (anyio.IncompleteRead, anyio.EndOfStream):
        await process.close()
        raise StartupError("The engine's guardian was killed while it started.") from None
    except BaseException:
        await process.close()
        raise
    if "error" in message:
        await process.close()
        raise StartupError(
            f"The engine cannot be started: {message['error']}. launch.python names the Python in whose "
            "environment it is installed."
        )
    process.pid = int(message["pid"])
    return process


def kill_session(session: int) -> None:
    """SIGKILL to every process of a session whose leader was the guardian."""
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        with suppress(FileNotFoundError, ProcessLookupError, PermissionError):
            fields = Path(f"/proc/{name}/stat").read_bytes().rpartition(b")")[2].split()
            if int(fields[3]) == session:
                os.kill(int(name), signal.SIGKILL)
