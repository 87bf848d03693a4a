"""One request that runs in a child: its pipes, its time, its end.

Holds: exactly one "end" frame per job, after all its "out" frames; a descendant that keeps the output open delays
the end by the grace at most, and is then killed with its group; one that has let go of it (a server started with
its output redirected) runs on, as it would after a shell's end; after a time-out or a kill nothing of the session
is alive; memory is bounded by the output bound and the input window.
"""

from __future__ import annotations

import os
import time
from typing import Callable  # noqa: UP035 - Python 3.8

from . import frames, processes
from .loop import Loop, Timer
from .outbox import Outbox
from .output import Output

_READ = 64 << 10


class Pipes:
    """The ends of a child's standard streams. ``stdin``: False gives it /dev/null."""

    def __init__(self, stdin: bool) -> None:
        self._open: list[int] = []
        try:
            if stdin:
                self.child_in, self.stdin = self._pipe()
            else:
                self.child_in, self.stdin = os.open(os.devnull, os.O_RDONLY), -1
                self._open.append(self.child_in)
            self.stdout, self.child_out = self._pipe()
            self.stderr, self.child_err = self._pipe()
        except OSError:
            self.close()
            raise
        for fd in (self.stdin, self.stdout, self.stderr):
            if fd >= 0:
                os.set_blocking(fd, False)

    def _pipe(self) -> tuple[int, int]:
        ends = os.pipe()
        self._open.extend(ends)
        return ends

    def close_child_ends(self) -> None:
        for fd in (self.child_in, self.child_out, self.child_err):
            os.close(fd)

    def close(self) -> None:
        for fd in self._open:
            os.close(fd)


class Job:
    """``on_end`` is called when it is over, with what sends the end. ``line_s``: how often to send the latest line
    of output."""

    def __init__(
        self,
        loop: Loop,
        outbox: Outbox,
        request: int,
        pid: int,
        pipes: Pipes,
        outputs: tuple[Output, Output],
        stdin_size: int,
        timeout_s: float | None,
        grace_s: float,
        on_end: Callable[[Callable[[], None]], None],
        line_s: float | None = None,
    ) -> None:
        self.pid = pid
        self._loop = loop
        self._outbox = outbox
        self._request = request
        self._grace_s = grace_s
        self._on_end = on_end
        self._started = time.monotonic()
        self._exit: int | None = None
        self._ended = False
        self._timed_out = False
        self._grace: Timer | None = None
        self._timer = None if timeout_s is None else loop.call_later(timeout_s, self._overdue)
        self._outputs: dict[int, Output] = {pipes.stdout: outputs[0], pipes.stderr: outputs[1]}
        self._all_outputs = outputs
        self._line_s = line_s
        self._line_timer: Timer | None = None
        self._latest: Output | None = None
        self._stdin = pipes.stdin
        self._stdin_left = stdin_size
        self._stdin_buffer = bytearray()
        for fd in self._outputs:
            self._listen(fd)
        self._send_line()

    def feed(self, data: bytes, last: bool) -> None:
        """A part of the child's standard input."""
        self._stdin_left -= self._stdin_left if last else len(data)
        if self._stdin >= 0:
            self._stdin_buffer += data
            self._write()

    def kill(self) -> None:
        if self._exit is None:
            processes.kill_session(self.pid)
        else:
            self._finish()

    def exited(self, status: int) -> None:
        """The child was reaped with this wait status."""
        self._exit = 128 + os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)
        if self._timer is not None:
            self._timer.cancel()
        if self._outputs:
            self._grace = self._loop.call_later(self._grace_s, self._finish)
        else:
            self._finish()

    def _overdue(self) -> None:
        self._timed_out = True
        processes.kill_session(self.pid)

    def _listen(self, fd: int) -> None:
        if fd in self._outputs:
            self._loop.watch(fd, read=lambda: self._read(fd))

    def _read(self, fd: int) -> None:
        output = self._outputs[fd]
        try:
            data = os.read(fd, _READ)
        except BlockingIOError:
            return
        if data:
            output.take(data)
            self._latest = output
            if output.full:
                self._loop.watch(fd)
                self._outbox.when_room(lambda: self._listen(fd))
            return
        self._drop_output(fd)
        if self._exit is not None and not self._outputs:
            self._finish()

    def _send_line(self) -> None:
        """Sends the latest line if there is a new one, and comes back after ``line_s``."""
        if self._line_s is None or self._ended:
            return
        latest, self._latest = self._latest, None
        line = latest.latest_line() if latest is not None and not self._outbox.full else b""
        if line:
            self._outbox.send({"id": self._request, "ev": "line"}, line)
        self._line_timer = self._loop.call_later(self._line_s, self._send_line)

    def _drop_output(self, fd: int) -> None:
        del self._outputs[fd]
        self._loop.watch(fd)
        os.close(fd)

    def _write(self) -> None:
        if self._stdin < 0:
            return
        try:
            while self._stdin_buffer:
                written = os.write(self._stdin, self._stdin_buffer[: frames.CHUNK])
                del self._stdin_buffer[:written]
                self._outbox.send({"id": self._request, "ev": "ack", "n": written})
        except BlockingIOError:
            self._loop.watch(self._stdin, write=self._write)
            return
        except OSError:
            self._close_stdin()  # the child wants no more of it
            return
        if self._stdin_left <= 0:
            self._close_stdin()
        else:
            self._loop.watch(self._stdin)

    def _close_stdin(self) -> None:
        if self._stdin >= 0:
            self._loop.watch(self._stdin)
            os.close(self._stdin)
            self._stdin = -1
            self._stdin_buffer.clear()

    def _finish(self) -> None:
        if self._ended:
            return
        self._ended = True
        if self._grace is not None:
            self._grace.cancel()
        if self._line_timer is not None:
            self._line_timer.cancel()
        if self._outputs or self._timed_out:
            processes.kill_group(self.pid)
        for fd in list(self._outputs):
            # What is in the pipe, at most one read, was written in time, however late we come to it.
            self._read(fd)
            if fd in self._outputs:
                self._drop_output(fd)
        self._close_stdin()
        dropped = sum(output.finish() for output in self._all_outputs)
        end = {
            "id": self._request,
            "ev": "end",
            # A time-out is a kill, also where the process ended by itself in the same moment.
            "exit_code": 137 if self._timed_out else self._exit,
            "timed_out": self._timed_out,
            "dropped": dropped,
            "duration_s": time.monotonic() - self._started,
        }
        self._on_end(lambda: self._outbox.send(end))
