"""Runs shell commands for a program of another user, one after the other.

Standard input has one request a line, ``{"id", "command", "cwd", "env", "timeout_s"}``; standard output gets one
result a line, ``{"id", "output", "returncode"}``, with ``error`` and ``error_type`` where the command did not run
to its end.
A command gets what mini-swe-agent's own ``LocalEnvironment`` gives it: ``/bin/sh``, a process group of its own
that is killed when the time is over, and standard error joined into standard output, whose end is awaited. What it
leaves in the background runs on. Of an output only ``MAX_OUTPUT`` is kept.

Standard library only. Everything here can be read and killed by the commands: it holds no secret.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from typing import Any

MAX_OUTPUT = 1 << 20
"""Bytes of one command's output, one half from its beginning and one from its end. The model is shown ten thousand
characters."""


def run(command: str, cwd: str, env: dict[str, str], timeout_s: float) -> dict[str, Any]:
    """Runs one command. ``returncode`` is negative after a signal."""
    try:
        process = subprocess.Popen(
            command,
            shell=True,
            cwd=cwd,
            env={**os.environ, **env},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    except (OSError, ValueError) as error:
        return {"output": "", **_failed(error)}
    assert process.stdout is not None
    kept = _Kept()
    deadline = time.monotonic() + timeout_s
    try:
        in_time = _read(process.stdout.fileno(), kept, deadline) and _ended(process, deadline)
        if not in_time:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            # What was written before the kill; a process that left the group may hold the pipe open.
            _read(process.stdout.fileno(), kept, time.monotonic())
            return {"output": kept.text(), **_failed(subprocess.TimeoutExpired(command, timeout_s))}
    finally:
        process.stdout.close()
    return {"output": kept.text(), "returncode": process.returncode}


class _Kept:
    """The first and the last half of an output."""

    def __init__(self) -> None:
        self._head, self._tail = bytearray(), bytearray()

    def add(self, data: bytes) -> None:
        room = MAX_OUTPUT // 2 - len(self._head)
        self._head += data[:room]
        self._tail += data[room:]
        if len(self._tail) > MAX_OUTPUT:  # trimmed now and then, not with every part
            del self._tail[: -MAX_OUTPUT // 2]

    def text(self) -> str:
        return (self._head + self._tail[-MAX_OUTPUT // 2 :]).decode("utf-8", errors="replace")


def _read(fd: int, kept: _Kept, deadline: float) -> bool:
    """Reads to the end; false where the deadline came before it. Reads what is there even when it is over."""
    while True:
        left = max(0.0, deadline - time.monotonic())
        if not select.select([fd], [], [], left)[0]:
            return False
        data = os.read(fd, 1 << 16)
        if not data:
            return True
        kept.add(data)
        if left == 0.0:
            return False


def _ended(process: subprocess.Popen[bytes], deadline: float) -> bool:
    try:
        process.wait(max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        return False
    return True


def _failed(error: Exception) -> dict[str, Any]:
    return {"returncode": -1, "error": str(error), "error_type": type(error).__name__}


def main() -> None:
    for line in sys.stdin:
        asked = json.loads(line)
        result = run(asked["command"], asked["cwd"], asked["env"], asked["timeout_s"])
        sys.stdout.write(json.dumps({"id": asked["id"], **result}) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
