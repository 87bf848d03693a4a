"""Signals to child processes that asyncio watches."""

from __future__ import annotations

import contextlib
import os
from asyncio.subprocess import Process


def send_signal(process: Process, number: int) -> None:
    """Nothing where the process has ended. Not ``Process.send_signal``, nor ``kill`` and ``terminate``: what they
    call (subprocess.Popen.send_signal, since Python 3.9) reaps a child that has just ended before asyncio's own
    watcher can, which then knows no exit code."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, number)
