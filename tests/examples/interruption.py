"""An example that is interrupted at its work: by Ctrl-C, by SIGTERM, or killed."""

from __future__ import annotations

import signal
import subprocess
import time
from pathlib import Path

from turnstile_server.demo.local_server import descendants, running

STARTED_S = 200.0
ENDED_S = 60.0
GONE_S = 20.0
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
    assert not family & running()
