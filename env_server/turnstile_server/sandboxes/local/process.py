"""The part of a local sandbox on the host beside its sockets: process, control group, files, record, log.

Owns each of them from the moment it exists; ``release`` ends whatever of them exists, in any state.
"""

from __future__ import annotations

import contextlib
import logging
import os
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
from turnstile_server.errors import SandboxDeath
from turnstile_server.sandboxes.background import BackgroundTask, BackgroundTasks, through_shortages
from turnstile_server.sandboxes.helper.turnstile_helper.frames import CONNECTION_LOST
from turnstile_server.sandboxes.local import cgroups, orphans
from turnstile_server.sandboxes.local.machine_kills import MachineKills
from turnstile_server.sandboxes.run_folder import remove_folder
from turnstile_server.sandboxes.users import Uids

_LOG = logging.getLogger(__name__)
_LOG_SUFFIX = ".log"
_FILES_SUFFIX = ".files"
_SETTLE_S = 2.0
"""A helper whose connection has ended exits a moment later."""
_OUTPUT_BYTES = 2000
"""Last bytes of a process's output that an error shows."""


class LocalProcess:
    """``name``: the sandbox's; all names of it in ``run_dir`` begin with it. ``kills``: what stands in for a
    control group's count."""

    def __init__(self, name: str, run_dir: Path, tasks: BackgroundTasks, kills: MachineKills) -> None:
        self._kills = kills
        self.name = name
        self.files = run_dir / (name + _FILES_SUFFIX)
        """Generated /etc files; where there is no isolation the work folder, homes and temporary files."""
        self.uids: Uids | None = None
        """The uids of the sandbox's users, where each has one."""
        self.helper_depth = 1
        """The helper is the child, or the grandchild, of the process."""
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
        start = partial(self._launch, command, environment)
        self._starting = self._tasks.start(start, name=f"launch {self.name}")
        process = await self._starting.wait()
        orphans.write_record(self._record, process.pid)

    async def _launch(self, command: Sequence[str], environment: Mapping[str, str]) -> Process:
        # The log is opened here: a caller that is cancelled before this has begun would close it under the start.
        with _opened(self._log_file) as log:
            return await start_process(command, env=environment, cwd="/", stderr=log)

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

    async def death(self) -> SandboxDeath:
        """The cause of the helper's death, or of its silence. An isolated one is process 1 of its name space, so
        code inside can neither kill nor stop it."""
        process = await self._started()
        if process is None:
            return SandboxDeath.OUTSIDE
        with anyio.move_on_after(_SETTLE_S):
            await process.wait()
        code = process.returncode
        # bubblewrap passes its child's end on as a shell does; its own end by a signal is a negative number.
        killed = code in (128 + signal.SIGKILL, -signal.SIGKILL)
        if self._memory_ran_out(killed):
            return SandboxDeath.MEMORY
        if self.marked:
            return SandboxDeath.INSIDE
        if code is None:
            return (
                SandboxDeath.OUTSIDE
                if orphans.stopped_below(process.pid, self.helper_depth)
                else SandboxDeath.INSIDE
            )
        return SandboxDeath.OUTSIDE if killed or code == CONNECTION_LOST else SandboxDeath.INSIDE

    def _memory_ran_out(self, killed: bool) -> bool:
        """``killed``: the helper was. Without that nothing of its end was the kernel's choice."""
        if self.group is not None:
            return killed and self.group.killed_for_memory()
        return killed and self._kills.rose_lately()

    async def release(self, timeout_s: float) -> None:
        process = await self._started()
        if process is not None:
            send_signal(process, signal.SIGKILL)
            with anyio.move_on_after(timeout_s):
                await process.wait()
            if process.returncode is None:
                _LOG.error("the sandbox %s cannot be killed", self.name)
        if self.marked:
            kill = partial(anyio.to_thread.run_sync, orphans.kill_marked, self.name)
            if not await through_shortages(kill):
                _LOG.error("processes of the sandbox %s cannot be killed", self.name)
        if self.group is not None and not await self.group.remove():
            _LOG.error("the control group of the sandbox %s cannot be removed", self.name)
        if output := self.output():
            _LOG.warning("output of the sandbox %s: %s", self.name, output)
        await remove_folder(self.files)
        self._record.unlink(missing_ok=True)
        self._log_file.unlink(missing_ok=True)

    async def _started(self) -> Process | None:
        if self._starting is None:
            return None
        try:
            return await self._starting.wait()
        except Exception as error:  # noqa: BLE001 - whoever started it has it; what else there is must be released
            _LOG.debug("the process of the sandbox %s was not started: %s", self.name, error)
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
