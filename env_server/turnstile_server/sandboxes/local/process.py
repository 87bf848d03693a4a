"""What exists of one local sandbox on the host besides its door: process, control group, files, record, log.

Owns all of them from the moment each is there; ``release`` ends whatever of them exists, in any state.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from turnstile_server.children import send_signal
from turnstile_server.sandboxes.local import cgroups, orphans

_LOG = logging.getLogger(__name__)
_LOG_SUFFIX = ".log"
_FILES_SUFFIX = ".files"
SAID_BYTES = 2000
"""Of what a sandbox's first process said, the last bytes are shown."""


class LocalProcess:
    """``name``: the sandbox's, with which all its names in ``run_dir`` begin."""

    def __init__(self, name: str, run_dir: Path) -> None:
        self.name = name
        self.files = run_dir / (name + _FILES_SUFFIX)
        """Work folder, homes and temporary files, where there is no isolation."""
        self.group: cgroups.Group | None = None
        self.marked = False
        self._record = run_dir / (name + orphans.RECORD_SUFFIX)
        self._log_file = run_dir / (name + _LOG_SUFFIX)
        self._starting: asyncio.Task[asyncio.subprocess.Process] | None = None

    async def run(self, command: Sequence[str], environment: dict[str, str]) -> None:
        """Raises OSError. Launched by this thread, not a worker: a sandbox dies with the thread it came from."""
        with _opened(self._log_file) as log:
            # A task of its own: cancelled half-way, a start loses the process that it has made.
            self._starting = asyncio.create_task(
                asyncio.create_subprocess_exec(
                    *command,
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=asyncio.subprocess.DEVNULL,
                    stderr=log,
                    env=environment,
                    cwd="/",
                    start_new_session=True,
                )
            )
            process = await asyncio.shield(self._starting)
        orphans.write_record(self._record, process.pid)

    async def ended(self) -> None:
        if self._starting is not None:
            await (await self._starting).wait()

    async def _started(self) -> asyncio.subprocess.Process | None:
        if self._starting is None:
            return None
        with contextlib.suppress(OSError):
            return await self._starting
        return None

    def said(self) -> str:
        """The last words of bubblewrap or the helper."""
        try:
            return self._log_file.read_bytes()[-SAID_BYTES:].decode(errors="replace").strip()
        except OSError:
            return ""

    async def release(self, timeout_s: float) -> None:
        process = await self._started()
        if process is not None:
            send_signal(process, signal.SIGKILL)
            try:
                async with asyncio.timeout(timeout_s):
                    await process.wait()
            except TimeoutError:
                _LOG.error("the sandbox %s cannot be killed", self.name)
        if self.marked and not await asyncio.to_thread(orphans.kill_marked, self.name):
            _LOG.error("processes of the sandbox %s do not go", self.name)
        if self.group is not None and not await self.group.remove():
            _LOG.error("the control group of the sandbox %s does not go", self.name)
        if said := self.said():
            _LOG.warning("the helper of the sandbox %s said: %s", self.name, said)
        await asyncio.to_thread(shutil.rmtree, self.files, ignore_errors=True)
        self._record.unlink(missing_ok=True)
        self._log_file.unlink(missing_ok=True)


def _opened(file: Path) -> IO[bytes]:
    return file.open("wb")
