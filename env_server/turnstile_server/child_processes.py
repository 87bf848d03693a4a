"""Child processes of the server: started so that no cancellation loses one, signalled so that its exit code is
kept."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from subprocess import DEVNULL
from typing import IO, Protocol

import anyio
from anyio.abc import Process

_DESCRIPTORS = 16
"""More than a start needs: three streams, each a pair where it is a pipe, and two pipes of the event loop."""


class WatchedProcess(Protocol):
    """A child of asyncio's or anyio's."""

    @property
    def pid(self) -> int: ...

    @property
    def returncode(self) -> int | None: ...


async def start_process(
    command: Sequence[str],
    *,
    env: Mapping[str, str],
    cwd: str | Path | None = None,
    stdin: int | IO[bytes] = DEVNULL,
    stdout: int | IO[bytes] = DEVNULL,
    stderr: int | IO[bytes] = DEVNULL,
) -> Process:
    """Starts ``command`` as the leader of a session of its own. Raises OSError.

    The start is shielded: one that is cancelled half-way would lose the process that it has made.
    """
    _need_descriptors()
    with anyio.CancelScope(shield=True):
        process = await anyio.open_process(
            command, stdin=stdin, stdout=stdout, stderr=stderr, env=env, cwd=cwd, start_new_session=True
        )
    return process  # noqa: RET504 - inside the block mypy sees a path without a return


def _need_descriptors() -> None:
    """Raises OSError where there are not enough: uvloop (0.23) then keeps for ever what it has opened of a child's
    streams, and each failed start takes more of the little there is."""
    probes: list[int] = []
    try:
        while len(probes) < _DESCRIPTORS:
            probes.append(os.open(os.devnull, os.O_RDONLY))
    finally:
        for probe in probes:
            os.close(probe)


def send_signal(process: WatchedProcess, number: int) -> None:
    """Sends a signal; does nothing if the process has ended.

    It uses ``os.kill`` because the process's own ``send_signal``, ``kill`` and ``terminate`` call
    ``subprocess.Popen.send_signal``, which since Python 3.9 may reap a child that has just ended before the event
    loop's watcher does. The watcher then knows no exit code.
    """
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, number)
