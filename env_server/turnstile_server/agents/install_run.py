"""Runs one command of an installation: bounded by its caller's deadline, its process group gone in any case."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
from collections.abc import Mapping

import anyio

from turnstile_server.errors import AgentNotInstalled

_ERROR_TAIL = 2000


async def run_install(what: str, command: tuple[str, ...], env: Mapping[str, str] | None = None) -> None:
    """``what``: names it in errors. ``env``: over the server's own. Its files can be read by every user of this
    machine, whatever the server's umask: the sandbox's agent is another user.

    Raises AgentNotInstalled with the end of what the command wrote, when it fails.
    """
    with tempfile.TemporaryFile() as output:
        async with await anyio.open_process(
            ("/bin/sh", "-c", 'umask 022; exec "$@"', "sh", *command),  # uvloop takes no umask
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env={**os.environ, **(env or {})},
            start_new_session=True,
        ) as process:
            try:
                code = await process.wait()
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
        if code != 0:
            output.seek(0)
            tail = output.read()[-_ERROR_TAIL:].decode(errors="replace").strip()
            raise AgentNotInstalled(f"{what} ended with {code}: {tail}")
