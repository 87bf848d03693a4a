"""Whether a command works on this machine: run once, at start, its whole process group ended."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import tempfile
from collections.abc import Mapping, Sequence

from turnstile_server.sandboxes.local.process import SAID_BYTES


async def probe_error(command: Sequence[str], environment: Mapping[str, str], timeout_s: float) -> str:
    """What it said when it failed; "" when it worked. Raises OSError where it cannot be run at all."""
    # To a file: the end of a pipe is not seen while a child of the command holds it.
    with tempfile.TemporaryFile() as said:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=said,
            env=environment,
            start_new_session=True,
        )
        try:
            async with asyncio.timeout(timeout_s):
                await process.wait()
        except TimeoutError:
            return "it does not end"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
        if process.returncode == 0:
            return ""
        said.seek(0)
        words = said.read(SAID_BYTES).decode(errors="replace").strip()
        return words or f"exit code {process.returncode}"
