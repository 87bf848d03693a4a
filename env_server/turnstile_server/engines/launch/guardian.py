"""Runs an engine and ends it with all its processes, even when the server is killed.

A program of its own, with the standard library alone: ``python -I -S guardian.py GRACE_S COMMAND…``. It is the
parent of the engine, and adopts every process of the engine that lost its parent (it is a child subreaper, see
prctl(2)), so the processes below it are all that the engine has left anywhere. The kernel's parent-death signal
would reach the engine alone, and not what the engine started.

stdin comes from the server: ``stop`` asks the engine to end (SIGTERM, after GRACE_S SIGKILL), ``kill`` kills; its
end says that the server is gone, and kills too. stdout goes to the server, one JSON object a line: ``{"pid": n}``
or ``{"error": "…"}``, then ``{"exit": code}`` (minus the signal's number for a signal). The engine writes to the
guardian's stderr. What must hold: the guardian ends only when no process of the engine is left that it may kill;
the engine dies with the guardian.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import time
from types import FrameType

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
KILL_PAUSE_S = 0.05
"""Between two rounds of SIGKILL: a process may have started others meanwhile."""


class Guardian:
    """One engine from its start until none of its processes is left."""

    def __init__(self, grace_s: float) -> None:
        self._grace_s = grace_s
        self._kill_at: float | None = None
        """When everything is killed (monotonic); None while the engine runs."""
        self._wake, waking = os.pipe()
        os.set_blocking(self._wake, False)
        os.set_blocking(waking, False)
        signal.set_wakeup_fd(waking, warn_on_full_buffer=False)
        # Functions, not SIG_IGN: the engine would inherit that.
        signal.signal(signal.SIGCHLD, _wake_only)
        signal.signal(signal.SIGHUP, _wake_only)
        signal.signal(signal.SIGPIPE, _wake_only)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._asked)
        self._stop_asked = False
        self._pid = 0
        self._ended = False

    def run(self, command: list[str]) -> None:
        try:
            self._pid = _start(command)
        except (OSError, subprocess.SubprocessError) as error:
            _report({"error": str(error)})
            return
        _report({"pid": self._pid})
        inputs = [0, self._wake]
        while True:
            self._reap()
            if self._ended and self._kill_at is None:
                self._kill_at = time.monotonic()  # what it left behind holds its memory and its ports
            if self._kill_now() and not _kill_below(os.getpid()):
                return
            for source in select.select(inputs, [], [], self._pause())[0]:
                said = os.read(source, 4096)
                if source == 0:
                    self._obey(said)
                    if not said:
                        inputs.remove(0)
            if self._stop_asked:
                self._stop_asked = False
                self._stop()

    def _obey(self, said: bytes) -> None:
        if not said or b"kill" in said:
            self._kill_at = time.monotonic()
        elif b"stop" in said:
            self._stop()

    def _asked(self, _number: int, _frame: FrameType | None) -> None:
        self._stop_asked = True

    def _stop(self) -> None:
        if self._kill_at is None:
            self._kill_at = time.monotonic() + self._grace_s
        if not self._ended:
            os.kill(self._pid, signal.SIGTERM)

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid == self._pid:
                self._ended = True
                _report({"exit": os.waitstatus_to_exitcode(status)})

    def _kill_now(self) -> bool:
        return self._kill_at is not None and (self._ended or time.monotonic() >= self._kill_at)

    def _pause(self) -> float | None:
        if self._kill_at is None:
            return None
        return KILL_PAUSE_S if self._kill_now() else max(self._kill_at - time.monotonic(), 0.0)


def _start(command: list[str]) -> int:
    """The engine's pid. It is in a process group of its own, because SGLang kills its group when it fails, and is
    killed when the guardian ends."""
    libc = ctypes.CDLL(None)
    guardian = os.getpid()

    def bind() -> None:
        os.setpgid(0, 0)
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != guardian:
            os._exit(70)

    libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=2, stderr=2, preexec_fn=bind)  # noqa: PLW1509 - there is one thread
    process.returncode = 0  # it is waited for here, not by Popen
    return process.pid


def _kill_below(root: int) -> bool:
    """SIGKILL to every process below ``root``. False when none is left that can be killed."""
    parents: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            parents.setdefault(_parent_of(int(name)), []).append(int(name))
    found, waiting = [], [root]
    while waiting:
        below = parents.pop(waiting.pop(), [])
        found += below
        waiting += below
    left = False
    for pid in found:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            left = True  # it has ended, and is reaped in the next round
        except PermissionError:
            continue
        else:
            left = True
    return left


def _parent_of(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return int(file.read().rpartition(b")")[2].split()[1])
    except (FileNotFoundError, ProcessLookupError):
        return 0


def _report(value: dict[str, object]) -> None:
    try:
        os.write(1, json.dumps(value).encode() + b"\n")
    except BrokenPipeError:
        return  # the server is gone; the end of stdin says so too


def _wake_only(_number: int, _frame: FrameType | None) -> None:
    """The signal wakes the loop by its descriptor."""


if __name__ == "__main__":
    Guardian(float(sys.argv[1])).run(sys.argv[2:])
