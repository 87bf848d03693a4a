"""A server of one's own for the length of a command: ``turnstile serve`` on free ports.

Started and stopped here, whatever happens: it is kept by ``turnstile._supervise``, which ends it when this process
is gone. Needs the server package; nothing of it is imported.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

START_S = 300.0
"""From start to the ready line: an embedded engine loads its weights in that time."""
STOP_S = 60.0
"""More than the keeper gives the server."""
SHOWN_LINES = 10


class PrivateServerError(Exception):
    """The server did not become ready. ``code``: its exit code, None where it did not exit."""

    def __init__(self, message: str, code: int | None) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True, slots=True)
class PrivateServer:
    url: str
    key: str


@asynccontextmanager
async def private_server(flags: Sequence[str], data_dir: Path, log: Path) -> AsyncIterator[PrivateServer]:
    """``flags`` of ``turnstile serve``. Raises PrivateServerError."""
    key = secrets.token_urlsafe(24)
    python = (sys.executable, "-P", "-m")
    serve = (
        *python,
        "turnstile",
        "serve",
        "--control-port",
        "0",
        "--agent-port",
        "0",
        "--data-dir",
        str(data_dir),
    )
    with log.open("ab") as errors:
        process = await asyncio.create_subprocess_exec(
            *(*python, "turnstile._supervise", *serve, *flags),
            env={**os.environ, "TURNSTILE_CONTROL_KEY": key},
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=errors,
            start_new_session=True,  # Ctrl-C in the terminal is for this process alone
        )
    try:
        yield PrivateServer(await _ready(process, log), key)
    finally:
        await _stop(process)


async def _ready(process: asyncio.subprocess.Process, log: Path) -> str:
    """The URL of the control door, from the line that the server prints when both doors are open."""
    assert process.stdout is not None
    try:
        async with asyncio.timeout(START_S):
            line = await process.stdout.readline()
    except TimeoutError:
        message = f"the private server was not ready after {START_S:g} s:\n{_last_words(log)}"
        raise PrivateServerError(message, None) from None
    if not line:
        code = await process.wait()
        raise PrivateServerError(f"the private server did not start: {_last_words(log)}", code)
    url: str = json.loads(line)["control_url"]
    return url


async def _stop(process: asyncio.subprocess.Process) -> None:
    assert process.stdin is not None
    process.stdin.close()
    try:
        async with asyncio.timeout(STOP_S):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()


def _last_words(log: Path) -> str:
    """What the server said to a person, or the end of its log."""
    lines = log.read_text(errors="replace").splitlines()
    said = [line.removeprefix("turnstile: ") for line in lines if line.startswith("turnstile: ")]
    return "; ".join(said) if said else "\n".join(lines[-SHOWN_LINES:])
