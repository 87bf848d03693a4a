"""Commands of `make upstream`: each has a time limit, and nothing that it started is left."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from test_sources import ROOT
from turnstile_server.demo.local_server import descendants

PR_SET_CHILD_SUBREAPER: Final = 36


@dataclass(frozen=True, slots=True)
class Completed:
    """A command that ended, or was stopped at its time limit (``code`` is None), and what it printed."""

    code: int | None
    output: str


def run(command: Sequence[str], limit_s: float, environment: Mapping[str, str] | None = None) -> Completed:
    """Run a command in the repository. Settings of the caller's own (TURNSTILE_…) do not count."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("TURNSTILE_")}
    code = None
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as printed:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**inherited, **(environment or {})},
            stdin=subprocess.DEVNULL,
            stdout=printed,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            with suppress(subprocess.TimeoutExpired):
                code = process.wait(limit_s)
        finally:
            stop_all(process)
        printed.seek(0)
        return Completed(code, printed.read())


def stop_all(process: subprocess.Popen[bytes]) -> None:
    """Kill the command's process group, and what left that group: this process is its children's reaper."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for _ in range(100):
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        left = descendants(os.getpid())
        if not left:
            return
        for pid, _ in left:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)


def adopt_orphans() -> None:
    """Become the parent of what commands leave behind, so that it is found and killed. Linux only."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
