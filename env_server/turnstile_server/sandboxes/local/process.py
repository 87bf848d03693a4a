"""The part of a local sandbox on the host beside its sockets: process, control group, files, record, log.

Owns each of them from the moment it exists; ``release`` ends whatever of them exists, in any state.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import signal
import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import IO

import anyio
import anyio.to_thread
from anyio.abc import Process

from turnstile_server.child_processes import send_signal, start_process
from turnstile_server.sandboxes.background import BackgroundTask, BackgroundTasks
from turnstile_server.sandboxes.local import cgroups, orphans

_LOG = logging.getLogger(__name__)
_LOG_SUFFIX = ".log"
_FILES_SUFFIX = ".files"
_OUTPUT_BYTES = 2000
"""Last bytes of a process's output that an error shows."""


class LocalProcess:
    """``name``: the sandbox's; all names of it in ``run_dir`` begin with it."""

    def __init__(self, name: str, run_dir: Path, tasks: BackgroundTasks) -> None:
        self.name = name
        self.files = run_dir / (name + _FILES_SUFFIX)
        """Work folder, homes and temporary files, where there is no isolation."""
        self.group: cgroups.ControlGroup | None = None
        self.marked = False
        """Processes of the sandbox bear its name in their environment, and are killed by it."""
        self._tasks = tasks
        self._record = run_dir / (name + orphans.RECORD_SUFFIX)
        self._log_file = run_dir / (name + _LOG_SUFFIX)
        self._starting: BackgroundTask[Process] | None = None

    async def run(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        """Starts the process. Raises OSError.

        It is started by this thread, not by a worker: a sandbox dies with the thread that launched it. It is
        started in the background: a caller that is cancelled half-way would lose the process.
        """
        with _opened(self._log_file) as log:
            start = partial(start_process, command, env=environment, cwd="/", stderr=log)
            self._starting = self._tasks.start(start, name=f"launch {self.name}")
            process = await self._starting.wait()
        orphans.write_record(self._record, process.pid)

    async def ended(self) -> None:
        """Waits for the end of the process. Raises OSError where it could not be started."""
        if self._starting is not None:
            await (await self._starting.wait()).wait()

    def output(self) -> str:
        """The last output of bubblewrap or the helper."""
        try:
            return self._log_file.read_bytes()[-_OUTPUT_BYTES:].decode(errors="replace").strip()
        except OSError:
            return ""

    async def release(self, timeout_s: float) -> None:
        process = await self._started()
        if process is not None:
            send_signal(process, signal.SIGKILL)
            with anyio.move_on_after(timeout_s):
                await process.wait()
            if process.returncode is None:
                _LOG.error("the sandbox %s cannot be killed", self.name)
        if self.marked and not await anyio.to_thread.run_sync(orphans.kill_marked, self.name):
            _LOG.error("processes of the sandbox %s cannot be killed", self.name)
        if self.group is not None and not await self.group.remove():
            _LOG.error("the control group of the sandbox %s cannot be removed", self.name)
        if output := self.output():
            _LOG.warning("output of the sandbox %s: %s", self.name, output)
        await anyio.to_thread.run_sync(partial(shutil.rmtree, self.files, ignore_errors=True))
        self._record.unlink(missing_ok=True)
        self._log_file.unlink(missing_ok=True)

    async def _started(self) -> Process | None:
        if self._starting is None:
            return None
        with contextlib.suppress(OSError):
            return await self._starting.wait()
        return None


async def probe_error(command: Sequence[str], environment: Mapping[str, str], timeout_s: float) -> str:
    """Runs a command that should work on this machine, and ends its whole process group.

    Returns "" when it worked, else its last output. Raises OSError where it cannot be run at all.
    """
    # To a file: the end of a pipe is not seen while a child of the command holds it.
    with tempfile.TemporaryFile() as output:
        process = await start_process(command, env=environment, stderr=output)
        try:
            with anyio.move_on_after(timeout_s):
                await process.wait()
            timed_out = process.returncode is None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            with anyio.CancelScope(shield=True):
                await process.wait()
        if timed_out:
            return "it does not end"
        if process.returncode == 0:
            return ""
        output.seek(0)
        words = output.read(_OUTPUT_BYTES).decode(errors="replace").strip()
        return words or f"exit code {process.returncode}"


def _opened(file: Path) -> IO[bytes]:
    return file.open("wb")
