"""One command under the engine's exec, for images that cannot run the helper.

The engine has no way to end a command, and the process id it knows is the host's. So the command is started
through a shell that first prints its process id inside. The engine makes it the leader of a session and of a
process group: killing is another exec, by root, of that group. Owns the stream, the thread that reads it and the
task that supervises the command; it ends exactly once, with a result or SandboxFailed.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

import anyio
import anyio.from_thread
from anyio.lowlevel import current_token

from turnstile_server.errors import SandboxDeath, SandboxFailed, SandboxUnavailable
from turnstile_server.sandboxes.background import BackgroundTasks
from turnstile_server.sandboxes.docker.engine import DockerEngine
from turnstile_server.sandboxes.docker.exec_stream import STDOUT, ExecStream
from turnstile_server.sandboxes.protocol import ExecResult

_WRAPPED = 'echo "$$"; cd -- "$1" || exit 126; shift; exec env -i "$@"'
_WRAPPED_SIZED = 'echo "$$"; cd -- "$2" || exit 126; size=$1; shift 2; head -c "$size" | env -i "$@"'
_MAX_PID_LINE = 32
KILLED = 137
_SETTLE_S = 0.3


def wrapped(argv: tuple[str, ...], cwd: str, env: dict[str, str], stdin_size: int | None = None) -> list[str]:
    """``argv`` in the folder ``cwd`` with no other environment than ``env``; its first output is its process
    id. ``stdin_size``: its input ends after so many bytes; None: with the connection's."""
    words = [*(f"{name}={value}" for name, value in env.items()), *argv]
    if stdin_size is None:
        return ["/bin/sh", "-c", _WRAPPED, "sh", cwd, *words]
    return ["/bin/sh", "-c", _WRAPPED_SIZED, "sh", str(stdin_size), cwd, *words]


class KeptOutput:
    """The first and the last half of ``limit`` bytes of an output, and the number of bytes left out between."""

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
    """A ``Process``. ``grace_s``: time from the kill to the end of the stream; later the sandbox is given up.
    ``on_end`` is called once, at the end."""

    def __init__(
        self,
        engine: DockerEngine,
        container: str,
        stream: ExecStream,
        tasks: BackgroundTasks,
        *,
        stdin: bytes,
        max_output_bytes: int,
        timeout_s: float | None,
        grace_s: float,
        on_end: Callable[[ExecProcess], None],
    ) -> None:
        self.death: SandboxDeath | None = None
        """The cause of the container's death, where it no longer ran at the command's end."""
        self._engine = engine
        self._container = container
        self._stream = stream
        self._grace_s = grace_s
        self._timeout_s = timeout_s
        self._on_end = on_end
        self._kept = {True: KeptOutput(max_output_bytes), False: KeptOutput(max_output_bytes)}
        self._started = time.monotonic()
        self._pid: int | None = None
        self._pid_known = anyio.Event()
        """Set when ``_pid`` is known, or never will be."""
        self._drained = anyio.Event()
        """Set at the end of the output; ``_broken`` is its error."""
        self._broken: OSError | None = None
        self._kill_wanted = anyio.Event()
        self._scope = anyio.CancelScope()
        self._token = current_token()
        self._pid_line: bytearray | None = bytearray()
        # A daemon: the stream of a command that never ends may not hold up the exit of the process.
        threading.Thread(target=self._pump, args=(stdin,), name="sandbox-exec", daemon=True).start()
        self._ending = tasks.start(self._supervise, name=f"command in {container}")

    async def begun(self) -> None:
        """Returns when the command runs, or has ended without; after ``grace_s`` at the latest. The engine answers
        before it has started what it was asked to start."""
        with anyio.move_on_after(self._grace_s):
            await self._pid_known.wait()

    async def wait(self) -> ExecResult:
        return await self._ending.wait()

    async def kill(self) -> None:
        self._kill_wanted.set()

    async def abandon(self) -> None:
        """Ends the stream, and every ``wait`` with SandboxFailed, because the sandbox is being destroyed."""
        self._stream.cut()
        self._scope.cancel()
        await self._ending.ended.wait()

    async def _supervise(self) -> ExecResult:
        try:
            with self._scope:
                return await self._result()
            raise SandboxFailed.of(SandboxDeath.OUTSIDE, "the sandbox was destroyed")
        finally:
            self._stream.cut()
            self._on_end(self)

    async def _result(self) -> ExecResult:
        timed_out = False
        try:
            await _first_of((self._kill_wanted, self._drained), self._timeout_s)
            if not self._drained.is_set():
                timed_out = not self._kill_wanted.is_set()
                await self._within_grace(self._pid_known)
                if self._pid is not None:
                    await self._kill_group(self._pid)
            await self._within_grace(self._drained)
            if self._broken is not None:
                await self._check_alive()
                broken = f"the connection to the sandbox broke: {self._broken}"
                raise SandboxFailed.of(SandboxDeath.OUTSIDE, broken) from self._broken
            code = await self._engine.exec_exit(self._stream.exec_id)
        except SandboxUnavailable as error:
            raise SandboxFailed.of(SandboxDeath.OUTSIDE, error.message) from error
        finally:
            self._stream.cut()
        await self._check_alive()
        if code == KILLED and not timed_out and not self._kill_wanted.is_set():
            # Perhaps with the whole container, which the engine knows a moment later.
            await anyio.sleep(_SETTLE_S)
            await self._check_alive()
        return ExecResult(
            exit_code=KILLED if timed_out or code is None else code,
            stdout=self._kept[True].all(),
            stderr=self._kept[False].all(),
            dropped_bytes=self._kept[True].dropped + self._kept[False].dropped,
            timed_out=timed_out,
            duration_s=time.monotonic() - self._started,
        )

    async def _within_grace(self, event: anyio.Event) -> None:
        with anyio.move_on_after(self._grace_s):
            await event.wait()
        if not event.is_set():
            raise SandboxUnavailable(f"a command did not end within {self._grace_s:g} s of being killed")

    async def _kill_group(self, pid: int) -> None:
        """No error where the group is empty."""
        await self._engine.exec_short(self._container, ["/bin/sh", "-c", f"kill -s KILL -- -{pid}"])

    async def _check_alive(self) -> None:
        try:
            state = await self._engine.state(self._container)
        except SandboxUnavailable as error:
            raise SandboxFailed.of(SandboxDeath.OUTSIDE, error.message) from error
        if state is None or not state.running:
            why = " (its memory ran out)" if state is not None and state.out_of_memory else ""
            self.death = SandboxDeath.OUTSIDE if state is None else state.death
            raise SandboxFailed.of(self.death, f"the sandbox ended{why}")

    # In the thread.

    def _pump(self, stdin: bytes) -> None:
        broken: OSError | None = None
        try:
            self._stream.pump(self._take, stdin)
        except OSError as error:
            broken = error
        try:
            anyio.from_thread.run_sync(self._set_drained, broken, token=self._token)
        except RuntimeError:
            return  # the event loop has ended, and every waiter with it

    def _take(self, stream: int, data: bytes) -> None:
        if stream == STDOUT and self._pid_line is not None:
            self._pid_line += data
            line, newline, rest = bytes(self._pid_line).partition(b"\n")
            if not newline and len(line) < _MAX_PID_LINE:
                return
            self._pid_line = None
            if not line.isdigit() or int(line) <= 1:
                raise OSError(f"a command began with {line[:_MAX_PID_LINE]!r}, not with its process id")
            anyio.from_thread.run_sync(self._set_pid, int(line), token=self._token)
            data = rest
        self._kept[stream == STDOUT].add(data)

    # Called by the thread, in the event loop.

    def _set_pid(self, pid: int) -> None:
        self._pid = pid
        self._pid_known.set()

    def _set_drained(self, broken: OSError | None) -> None:
        self._broken = broken
        self._drained.set()
        self._pid_known.set()


async def _first_of(events: Sequence[anyio.Event], timeout_s: float | None) -> None:
    """Waits until one of the events is set, or for ``timeout_s``."""
    with anyio.move_on_after(timeout_s):
        async with anyio.create_task_group() as group:

            async def watch(event: anyio.Event) -> None:
                await event.wait()
                group.cancel_scope.cancel()

            for event in events:
                group.start_soon(watch, event)
