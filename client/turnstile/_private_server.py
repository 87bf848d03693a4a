"""A private server for the length of a block: ``turnstile serve`` on free ports.

It never outlives this process: ``turnstile._supervise`` runs it and stops it when this process is gone. Needs the
server package, and imports nothing of it.
"""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
from anyio.abc import Process
from anyio.streams.buffered import BufferedByteReceiveStream

START_S = 300.0
"""From start to the ready line: an embedded engine loads its weights in that time."""
STOP_S = 60.0
"""More than the supervisor gives the server."""
SHOWN_LINES = 10
_MOST_BYTES = 1 << 20
"""Most bytes of the ready line."""


class PrivateServerError(Exception):
    """The server did not become ready. ``code``: its exit code, None where it did not exit."""

    def __init__(self, message: str, code: int | None) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True, slots=True)
class PrivateServer:
    url: str
    key: str
    tasks_left_out: bool
    """Some tasks of its folders cannot be used."""
    ended: Callable[[], Awaitable[int]]
    """Waits until it has ended by itself; its exit code."""


@asynccontextmanager
async def private_server(
    flags: Sequence[str],
    data_dir: Path,
    log: Path,
    environment: Mapping[str, str],
    *,
    key: str | None = None,
    python: str = sys.executable,
) -> AsyncIterator[PrivateServer]:
    """``flags`` of ``turnstile serve``; ``environment``: beside this process's; ``key``: its control key, unless
    given one of its own; ``python``: an interpreter that has the server package. Raises PrivateServerError."""
    key = key or secrets.token_urlsafe(24)
    module = (python, "-P", "-m")
    ports = ("--control-port", "0", "--agent-port", "0")
    serve = (*module, "turnstile", "serve", *ports, "--data-dir", str(data_dir))
    with log.open("ab") as errors:
        process = await anyio.open_process(
            (*module, "turnstile._supervise", *serve, *flags),
            env={**os.environ, **environment, "TURNSTILE_CONTROL_KEY": key},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            start_new_session=True,  # Ctrl-C in the terminal is for this process alone
        )
    try:
        ready = await _ready(process, log)
        yield PrivateServer(ready["control_url"], key, ready["tasks_left_out"], process.wait)
    finally:
        with anyio.CancelScope(shield=True):
            await _stop(process)


async def _ready(process: Process, log: Path) -> dict[str, Any]:
    """The line that the server prints when both listeners are open."""
    assert process.stdout is not None
    try:
        with anyio.fail_after(START_S):
            line = await BufferedByteReceiveStream(process.stdout).receive_until(b"\n", _MOST_BYTES)
    except TimeoutError:
        message = f"the server was not ready after {START_S:g} s:\n{last_words(log)}"
        raise PrivateServerError(message, None) from None
    except (anyio.EndOfStream, anyio.IncompleteRead):
        code = await process.wait()
        raise PrivateServerError(f"the server did not start: {last_words(log)}", code) from None
    ready: dict[str, Any] = json.loads(line)
    return ready


async def _stop(process: Process) -> None:
    """The end of its stdin tells the supervisor to stop the server."""
    assert process.stdin is not None
    await process.stdin.aclose()
    with anyio.move_on_after(STOP_S):
        await process.wait()
    if process.returncode is None:
        process.kill()
    await process.aclose()


def last_words(log: Path) -> str:
    """The server's own error messages, or the end of its log."""
    lines = log.read_text(errors="replace").splitlines()
    messages = [line.removeprefix("turnstile: ") for line in lines if line.startswith("turnstile: ")]
    return "; ".join(messages) if messages else "\n".join(lines[-SHOWN_LINES:])
