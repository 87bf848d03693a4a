"""Signals to child processes that the event loop watches."""

from __future__ import annotations

import contextlib
import os
from typing import Protocol


class WatchedProcess(Protocol):
    """A child of asyncio's or anyio's."""

    @property
    def pid(self) -> int: ...

    @property
    def returncode(self) -> int | None: ...


def send_signal(process: WatchedProcess, number: int) -> None:
    """Sends a signal; does nothing if the process has ended.

    It uses ``os.kill`` because the process's own ``send_signal``, ``kill`` and ``terminate`` call
    ``subprocess.Popen.send_signal``, which since Python 3.9 may reap a child that has just ended before the event
    loop's watcher does. The watcher then knows no exit code.
    """
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, number)
