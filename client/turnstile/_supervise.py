"""Runs a command until its own stdin ends: ``python -m turnstile._supervise COMMAND ARGUMENT …``.

The process that started the supervisor holds the other end of that pipe, so the command does not outlive it,
however it died (``kill -9`` included). The command gets SIGTERM first and SIGKILL after ``GRACE_S``; its exit code
is the supervisor's. Standard library only: it is a process beside every private server.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading

GRACE_S = 30.0
"""More than the server takes to stop by itself (its shutdown_grace_s, and the sandboxes')."""


def main(command: list[str]) -> int:
    with subprocess.Popen(command, stdin=subprocess.DEVNULL) as process:
        threading.Thread(target=_stop_at_end_of_stdin, args=(process,), daemon=True).start()
        signal.signal(signal.SIGTERM, lambda *_: process.terminate())
        return process.wait()


def _stop_at_end_of_stdin(process: subprocess.Popen[bytes]) -> None:
    while os.read(sys.stdin.fileno(), 4096):
        pass
    process.terminate()
    try:
        process.wait(GRACE_S)
    except subprocess.TimeoutExpired:
        process.kill()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
