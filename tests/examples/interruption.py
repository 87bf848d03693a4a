"""An example that is interrupted at its work: by Ctrl-C, by SIGTERM, or killed."""

from __future__ import annotations

import signal
import subprocess
import time
from pathlib import Path

from turnstile._supervise import GRACE_S
from turnstile_server.demo.local_server import descendants, running

STARTED_S = 200.0
ENDED_S = 60.0
GONE_S = GRACE_S + 30.0
"""The supervisor kills a server after its grace, and a worker may be in its imports: it looks for its parent then.
Nothing was left after 5 s on a quiet machine, after 27 s where seven runs shared two cores."""
FAMILY = 6
"""Supervisor, server, engine, a sandbox and who is in it."""


def _heed_signals() -> None:
    """Without job control a shell has its background processes, and all below them, ignore SIGINT; nohup has them
    ignore SIGHUP."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def leaves_nothing_when_interrupted(
    command: list[str], folder: Path, *, processes: int = FAMILY, by: signal.Signals = signal.SIGINT
) -> None:
    """Sends ``command`` the signal ``by`` once it is at work, with ``processes`` below it: it must end, with an
    error, and all of them."""
    process = subprocess.Popen(
        command,
        cwd=folder,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        preexec_fn=_heed_signals,  # noqa: PLW1509 - no other thread of the tests holds a lock that it needs
    )
    family: set[tuple[int, str]] = set()
    try:
        deadline = time.monotonic() + STARTED_S
        while len(family) < processes and time.monotonic() < deadline:
            time.sleep(0.1)
            family = descendants(process.pid)
        assert len(family) >= processes
        process.send_signal(by)
        assert process.wait(ENDED_S) != 0
    finally:
        process.kill()
        process.wait()
    deadline = time.monotonic() + GONE_S
    while family & running() and time.monotonic() < deadline:
        time.sleep(0.1)
    left = {pid: _command(pid) for pid, _ in family & running()}
    assert left == {}


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return "ended meanwhile"
