"""One command under the engine's exec, for images that cannot run the helper.

The engine has no way to end a command, and its own number for it is the host's; so the command is started
through a shell that first says its process id inside. The engine makes it the leader of a session and of a
process group: killing is another exec, by root, of that group. Owns the stream, the thread that reads it and the
task that sees to the command's end; ended exactly once, with a result or SandboxFailed.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any

from turnstile_server.errors import SandboxFailed, SandboxUnavailable
from turnstile_server.sandboxes.docker.engine import DockerEngine
from turnstile_server.sandboxes.docker.exec_stream import STDOUT, ExecStream
from turnstile_server.sandboxes.protocol import ExecResult

_WRAPPED = 'echo "$$"; cd -- "$1" || exit 126; shift; exec env -i "$@"'
_MAX_PID_LINE = 32
KILLED = 137
_SETTLE_S = 0.3


def wrapped(argv: tuple[str, ...], cwd: str, env: dict[str, str]) -> list[str]:
    """``argv`` in the folder ``cwd`` with no other environment than ``env``, its process id said first."""
    return ["/bin/sh", "-c", _WRAPPED, "sh", cwd, *(f"{name}={value}" for name, value in env.items()), *argv]


class Kept:
    """The first and the last half of ``limit`` bytes of what is added, and how many were in between."""

    def __init__(self, limit: int) -> None:
        self._first = bytearray()
        self._last = bytearray()
        self._room = limit - limit // 2
        self._most_last = limit // 2
        self.dropped = 0

    def add(self, data: bytes) -> None:
        taken = data[: self._room - len(self._first)]
        self._first += taken
        self._last += data[len(taken) :]
        if (over := len(self._last) - self._most_last) > 0:
            del self._last[:over]
            self.dropped += over

    def all(self) -> bytes:
        return bytes(self._first + self._last)


class ExecProcess:
    """``grace_s``: time between the kill and the end of the stream, then the sandbox is given up."""

    def __init__(
        self,
        engine: DockerEngine,
        container: str,
        stream: ExecStream,
        *,
        stdin: bytes,
        max_output_bytes: int,
        timeout_s: float | None,
        grace_s: float,
    ) -> None:
        self._engine = engine
        self._container = container
        self._stream = stream
        self._grace_s = grace_s
        self._timeout_s = timeout_s
        self._kept = {True: Kept(max_output_bytes), False: Kept(max_output_bytes)}
        self._started = time.monotonic()
        self._loop = asyncio.get_running_loop()
        self._pid: asyncio.Future[int] = self._loop.create_future()
        self._drained: asyncio.Future[None] = self._loop.create_future()
        self._pid_line: bytearray | None = bytearray()
        self._asked_to_die = asyncio.Event()
        self.found_dead = False
        """At its end the container no longer ran."""
        threading.Thread(target=self._pump, args=(stdin,), name="sandbox-exec", daemon=True).start()
        self._ending = asyncio.create_task(self._see_to_the_end())
        # Nobody need be waiting for a detached command.
        self._ending.add_done_callback(lambda task: task.cancelled() or task.exception())

    def when_ended(self, call: Callable[[], object]) -> None:
        self._ending.add_done_callback(lambda _: call())

    async def begun(self) -> None:
        """Returns when the command runs, or has ended without; after ``grace_s`` at the latest. The engine answers
        before it has started what it was asked to start."""
        either: set[asyncio.Future[Any]] = {self._pid, self._ending}
        await asyncio.wait(either, timeout=self._grace_s, return_when=asyncio.FIRST_COMPLETED)

    async def wait(self) -> ExecResult:
        return await asyncio.shield(self._ending)

    async def kill(self) -> None:
        self._asked_to_die.set()

    async def abandon(self) -> None:
        """The sandbox is being destroyed: ends the stream, and the waiting with SandboxFailed."""
        self._stream.cut()
        if not self._ending.done():
            self._ending.cancel()
            await asyncio.wait({self._ending})

    async def _see_to_the_end(self) -> ExecResult:
        asked = asyncio.create_task(self._asked_to_die.wait())
        timed_out = False
        try:
            either: set[asyncio.Future[Any]] = {asked, self._drained}
            await asyncio.wait(either, timeout=self._timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if not self._drained.done():
                timed_out = not asked.done()
                await self._kill_group(await self._within_grace(self._pid))
            await self._within_grace(self._drained)
            code = await self._engine.exec_exit(self._stream.exec_id)
        except OSError as error:
            raise SandboxFailed(f"the connection to the sandbox broke: {error}") from error
        except SandboxUnavailable as error:
            raise SandboxFailed(error.message) from error
        except asyncio.CancelledError:
            raise SandboxFailed("the sandbox was destroyed") from None
        finally:
            asked.cancel()
            self._stream.cut()
        await self._check_alive()
        if code == KILLED and not timed_out and not self._asked_to_die.is_set():
            # Perhaps with the whole container, which the engine knows a moment later.
            await asyncio.sleep(_SETTLE_S)
            await self._check_alive()
        return ExecResult(
            exit_code=KILLED if timed_out or code is None else code,
            stdout=self._kept[True].all(),
            stderr=self._kept[False].all(),
            dropped_bytes=self._kept[True].dropped + self._kept[False].dropped,
            timed_out=timed_out,
            duration_s=time.monotonic() - self._started,
        )

    async def _within_grace(self, future: asyncio.Future[int] | asyncio.Future[None]) -> int:
        await asyncio.wait({future}, timeout=self._grace_s)
        if not future.done():
            raise SandboxUnavailable(f"a command did not end within {self._grace_s:g} s of being killed")
        return future.result() or 0

    async def _kill_group(self, pid: int) -> None:
        """No error where nobody is left in it."""
        await self._engine.exec_short(self._container, ["/bin/sh", "-c", f"kill -s KILL -- -{pid}"])

    async def _check_alive(self) -> None:
        try:
            state = await self._engine.state(self._container)
        except SandboxUnavailable as error:
            raise SandboxFailed(error.message) from error
        if state is None or not state.running:
            self.found_dead = True
            why = " (its memory ran out)" if state is not None and state.out_of_memory else ""
            raise SandboxFailed(f"the sandbox ended{why}")

    # In the thread.

    def _pump(self, stdin: bytes) -> None:
        try:
            self._stream.pump(self._take, stdin)
        except OSError as error:
            self._tell(self._drained, error)
        else:
            self._tell(self._drained, None)
        self._tell(self._pid, OSError("the command never started"))

    def _take(self, stream: int, data: bytes) -> None:
        if stream == STDOUT and self._pid_line is not None:
            self._pid_line += data
            line, newline, rest = bytes(self._pid_line).partition(b"\n")
            if not newline and len(line) < _MAX_PID_LINE:
                return
            self._pid_line = None
            if not line.isdigit() or int(line) <= 1:
                raise OSError(f"a command began with {line[:_MAX_PID_LINE]!r}, not with its process id")
            self._tell(self._pid, int(line))
            data = rest
        self._kept[stream == STDOUT].add(data)

    def _tell(self, future: asyncio.Future[int] | asyncio.Future[None], outcome: int | OSError | None) -> None:
        def tell() -> None:
            if future.done():
                return
            if isinstance(outcome, OSError):
                future.set_exception(outcome)
                future.exception()  # seen, whether or not anybody asks
            else:
                future.set_result(outcome)  # type: ignore[arg-type]

        try:
            self._loop.call_soon_threadsafe(tell)
        except RuntimeError:
            return  # the loop has ended, and with it everybody who might ask
