"""Runs a command until its own stdin ends: ``python -m turnstile._supervise COMMAND ARGUMENT …``.

The process that started the supervisor holds the other end of that pipe, so the command does not outlive it,
however it died (``kill -9`` included). The command gets SIGINT first and SIGKILL after ``GRACE_S``; its exit code
is the supervisor's (128 and the number of the signal that killed it, as in a shell). Should the supervisor itself
be killed, Linux sends the command SIGINT. Not SIGTERM, by which a server drains: who played its episodes is gone,
or has ended them. Standard library only: it is a process beside every private server.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading

GRACE_S = 30.0
"""More than the server takes to stop by itself (its shutdown_grace_s, and the sandboxes')."""


_PR_SET_PDEATHSIG = 1
"""prctl(2)."""


def main(command: list[str]) -> int:
    # Workers of Ray block it, and children inherit that.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGINT, signal.SIGTERM))
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        preexec_fn=_end_with_parent,  # noqa: PLW1509 - there is no other thread yet
    ) as process:
        threading.Thread(target=_stop_at_end_of_stdin, args=(process,), daemon=True).start()
        signal.signal(signal.SIGTERM, lambda *_: process.send_signal(signal.SIGINT))
        code = process.wait()
        return 128 - code if code < 0 else code


def _end_with_parent() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # a shell's background jobs ignore it
    with contextlib.suppress(OSError, AttributeError):  # not on Linux
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGINT, 0, 0, 0)


def _stop_at_end_of_stdin(process: subprocess.Popen[bytes]) -> None:
    while os.read(sys.stdin.fileno(), 4096):
        pass
    process.send_signal(signal.SIGINT)
    try:
        process.wait(GRACE_S)
    except subprocess.TimeoutExpired:
        process.kill()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
