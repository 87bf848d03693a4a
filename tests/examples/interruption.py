"""An example that is interrupted at its work: by Ctrl-C, by SIGTERM, or killed."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path

from turnstile._supervise import GRACE_S
from turnstile_server.demo.local_server import descendants, running
from waiting import wait_until_sync

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

    def whole_family() -> set[tuple[int, str]]:
        found = descendants(process.pid)
        return found if len(found) >= processes else set()

    try:
        family = wait_until_sync(whole_family, f"{processes} processes", within_s=STARTED_S)
        process.send_signal(by)
        assert process.wait(ENDED_S) != 0
    finally:
        process.kill()
        process.wait()

    def left() -> dict[int, str]:
        return {pid: _command(pid) for pid, _ in family & running()}

    wait_until_sync(lambda: not left(), "nothing is left", within_s=GONE_S)


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return "ended meanwhile"
