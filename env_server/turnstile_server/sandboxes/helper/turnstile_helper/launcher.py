"""The launcher: how a command that judges has programs run as another user, the work's.

The command inherits one end of a socket pair (descriptor ``DESCRIPTOR``, in its environment ``VARIABLE``). The
socket has no path and no other process gets it: who holds it may launch, nobody else. One message (SOCK_SEQPACKET)
asks for one thing and brings descriptors with it (SCM_RIGHTS)::

    b"launch" + [control, stdin, stdout, stderr]      run a program
    b"sweep" + [control]                              kill every process of that user

``control`` is one end of a stream socket pair. For a launch the client writes one line of JSON to it: ``argv``,
``cwd`` (null: the work folder), ``env`` (over the sandbox's own), ``timeout_s`` (null: until it ends). The answer
to either is one line, ``{"exit_code", "timed_out"}`` or ``{"error"}``, and the end of the stream. A client that
closes its end kills what it launched.

Holds: a launched program has its three standard descriptors and no other; its session is killed when it has ended,
when its time is over, when its client is gone, and when the command that judges has ended. The end of that command
is told after the last sweep, so what comes next may run as the same user.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import stat
from typing import Any, Callable, List, Mapping, Optional  # noqa: UP035 - Python 3.8

from . import descriptors, processes
from .loop import Loop, Timer
from .spawn import CANNOT_RUN, Spawner

VARIABLE = "TURNSTILE_LAUNCHER"
DESCRIPTOR = 3
_MAX_REQUEST = 4 << 20
"""Bytes of one line: arguments and environment may have this much together."""
_MAX_LAUNCHED = 64
"""Programs at once."""
_STREAMS = 3
_PIPE_MODE = 0o666
"""Mode of pipes that a program gets: it may open ``/dev/stdout`` and the like, which lead to them, by name."""
_OOM_SCORE = "1000"
"""The work is killed before what judges it when memory runs out."""

Adopt = Callable[[int, Callable[[int], None]], None]
"""Takes a child's pid, and what to call with its wait status."""


class LaunchConfig:
    """User, environment and work folder of launched programs."""

    def __init__(self, user: str, env: Mapping[str, str], workdir: str) -> None:
        self.user = user
        self.env = env
        self.workdir = workdir


class Launcher:
    """The helper's end of one command's launcher. ``given`` is the command's end, closed by ``started``."""

    def __init__(self, loop: Loop, spawner: Spawner, config: LaunchConfig, adopt: Adopt, grace_s: float) -> None:
        self._loop = loop
        self._grace_s = grace_s
        self._spawner = spawner
        self._config = config
        self._adopt = adopt
        self._ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.given = theirs.detach()
        self._ours.setblocking(False)
        self._launched: dict[int, _Launched] = {}
        self._closed = False
        loop.watch(self._ours.fileno(), read=self._read)

    def started(self) -> None:
        """The command has its end now."""
        os.close(self.given)

    def close(self, then: Callable[[], None]) -> None:
        """The command has ended: so does everything that it launched. Calls ``then`` when the last sweep is over,
        or after the grace: the work could stop the process that sweeps, which is of its user."""
        if self._closed:
            return
        self._closed = True
        timer: Timer

        def over() -> None:
            if timer.callback is not None:
                timer.cancel()
                then()

        timer = self._loop.call_later(self._grace_s, over)
        self._loop.watch(self._ours.fileno())
        self._ours.close()
        for one in list(self._launched.values()):
            one.end()
        self._sweep(over)

    def _read(self) -> None:
        try:
            word, fds, whole = descriptors.receive(self._ours, 64, _STREAMS + 1)
        except BlockingIOError:
            return
        except OSError:
            word, fds, whole = b"", [], True
        if not word:
            # Every copy of the command's end is closed; the command itself may run on.
            self._loop.watch(self._ours.fileno())
            _close(fds)
        elif word == b"launch" and len(fds) == _STREAMS + 1 and whole:
            if len(self._launched) >= _MAX_LAUNCHED:
                _answer(fds[0], {"error": f"{_MAX_LAUNCHED} programs run already"})
                _close(fds)
                return
            one = _Launched(self._loop, self._spawner, self._config, fds, self._adopt, self._over)
            self._launched[fds[0]] = one
            one.begin()
        elif word == b"sweep" and len(fds) == 1:
            self._sweep(lambda: _swept(fds[0]))
        else:
            _close(fds)

    def _over(self, control: int) -> None:
        del self._launched[control]

    def _sweep(self, then: Callable[[], None]) -> None:
        """Kills what left its session, where the user's processes are apart: ``kill(-1)`` reaches no others."""

        def kill() -> int:
            with contextlib.suppress(ProcessLookupError):
                os.kill(-1, signal.SIGKILL)
            return 0

        if not self._spawner.is_apart(self._config.user):
            then()
            return
        null = os.open(os.devnull, os.O_RDWR)
        try:
            self._adopt(self._spawner.fork(kill, self._config.user, (null, null, null)), lambda status: then())
        except OSError:
            then()  # no process can be made; the sandbox is about to end anyway
        finally:
            os.close(null)


class _Launched:
    """One launched program, from its request to its end."""

    def __init__(
        self,
        loop: Loop,
        spawner: Spawner,
        config: LaunchConfig,
        fds: List[int],  # noqa: UP006
        adopt: Adopt,
        on_end: Callable[[int], None],
    ) -> None:
        self._loop = loop
        self._spawner = spawner
        self._config = config
        self._adopt = adopt
        self._on_end = on_end
        self._control, self._stdio = fds[0], fds[1:]
        self._line = b""
        self._pid: Optional[int] = None  # noqa: UP045
        self._timer: Optional[Timer] = None  # noqa: UP045
        self._timed_out = False

    def begin(self) -> None:
        """Waits for the request."""
        os.set_blocking(self._control, False)
        try:
            self._loop.watch(self._control, read=self._read)
        except OSError:  # not a descriptor that can be waited for
            self._stop()

    def end(self) -> None:
        """Kills it; its end follows."""
        if self._pid is None:
            self._stop()
        else:
            processes.kill_session(self._pid)

    def _read(self) -> None:
        try:
            data = os.read(self._control, 1 << 16)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._loop.watch(self._control)
            self.end()
        elif self._pid is None:
            self._line += data
            if b"\n" in self._line:
                self._start(self._line.partition(b"\n")[0])
            elif len(self._line) > _MAX_REQUEST:
                self._fail("the request is too long")

    def _start(self, line: bytes) -> None:
        try:
            asked = json.loads(line)
            argv = [os.fsencode(word) for word in asked["argv"]]
            env = {os.fsencode(k): os.fsencode(v) for k, v in {**self._config.env, **asked["env"]}.items()}
            cwd = os.fsencode(asked["cwd"] or self._config.workdir)
            timeout_s = None if asked["timeout_s"] is None else float(asked["timeout_s"])
            if not argv or any(b"\0" in word for word in [*argv, *env, *env.values(), cwd]):
                raise ValueError("no program, or a NUL character")
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            self._fail(f"not a request: {error}")
            return
        for fd in self._stdio:
            with contextlib.suppress(OSError):  # who made the pipe may be another user; then its own mode stays
                if stat.S_ISFIFO(os.fstat(fd).st_mode):
                    os.fchmod(fd, _PIPE_MODE)
        try:
            self._pid = self._spawner.command(argv, cwd, env, self._config.user, self._stdio, oom_score=_OOM_SCORE)
        except OSError as error:
            self._fail(f"no process could be made: {error.strerror}")
            return
        self._close_stdio()
        if timeout_s is not None:
            self._timer = self._loop.call_later(timeout_s, self._overdue)
        self._adopt(self._pid, self._exited)

    def _overdue(self) -> None:
        self._timed_out = True
        self.end()

    def _exited(self, status: int) -> None:
        assert self._pid is not None
        processes.kill_session(self._pid)
        code = 128 + os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)
        _answer(self._control, {"exit_code": 137 if self._timed_out else code, "timed_out": self._timed_out})
        self._stop()

    def _fail(self, sentence: str) -> None:
        _answer(self._control, {"error": sentence, "exit_code": CANNOT_RUN})
        self._stop()

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._loop.watch(self._control)
        self._close_stdio()
        os.close(self._control)
        self._on_end(self._control)

    def _close_stdio(self) -> None:
        fds, self._stdio = self._stdio, []
        _close(fds)


def _swept(control: int) -> None:
    _answer(control, {"exit_code": 0, "timed_out": False})
    os.close(control)


def _answer(control: int, value: Mapping[str, Any]) -> None:
    with contextlib.suppress(OSError):  # the client is gone
        os.write(control, json.dumps(value).encode() + b"\n")


def _close(fds: List[int]) -> None:  # noqa: UP006
    for fd in fds:
        os.close(fd)
