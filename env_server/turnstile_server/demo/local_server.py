"""Runs ``turnstile serve`` as a child process for the length of a block.

Invariant: ``serve`` returns only when the server and every process below it are gone, and raises LocalServerError
if one is left. Where the calling process is killed, the server ends by itself (``turnstile._supervise``). Linux
only: processes are found in /proc.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import anyio
from anyio.abc import Process
from anyio.streams.buffered import BufferedByteReceiveStream

TURNSTILE = (sys.executable, "-P", "-m", "turnstile")
"""The ``turnstile`` command of this interpreter. ``-P``: no module of the working directory replaces it."""
SUPERVISED = (sys.executable, "-P", "-m", "turnstile._supervise")
"""Runs the command that follows until its stdin ends, so that it does not outlive the process that started it."""
START_S = 180.0
STOP_S = 30.0
MAX_READY_LINE = 1 << 16


class LocalServerError(Exception):
    """The server did not start, exited with an error, or left a process behind."""


class Waitable(Protocol):
    """A child process of asyncio's or anyio's."""

    @property
    def pid(self) -> int: ...
    @property
    def returncode(self) -> int | None: ...
    def kill(self) -> None: ...
    async def wait(self) -> int: ...


@dataclass(frozen=True, slots=True)
class LocalServer:
    """A running server: the URLs of its control API and model API, its control key, process and sandbox kind."""

    control_url: str
    agent_url: str
    control_key: str
    data_dir: Path
    pid: int
    """The server's own, not its supervisor's."""
    sandboxes: str


@contextlib.asynccontextmanager
async def serve(
    model: Path | str,
    data_dir: Path,
    *,
    engine_url: str | Sequence[str] | None = None,
    engine: str = "embedded",
    options: Sequence[str] = (),
) -> AsyncIterator[LocalServer]:
    """Run `turnstile serve` on free ports, with ``engine`` or with the servers at ``engine_url`` (SGLang, unless
    ``engine`` names another kind).

    ``options`` are further flags. The server's log is ``data_dir/../server.log``. Raises LocalServerError when the
    server does not become ready, exits with an error, or leaves a process behind.
    """
    urls = [engine_url] if isinstance(engine_url, str) else list(engine_url or ())
    kind = "sglang" if urls and engine == "embedded" else engine
    samples = ["--engine", kind, *(word for url in urls for word in ("--engine-url", url))]
    ports = ["--control-port", "0", "--agent-port", "0"]
    folders = ["--model", str(model), "--data-dir", str(data_dir)]
    key = secrets.token_urlsafe(24)
    log = data_dir.parent / "server.log"
    with log.open("ab") as errors:
        process = await anyio.open_process(
            (*SUPERVISED, *TURNSTILE, "serve", *samples, *ports, *folders, *options),
            env={**os.environ, "TURNSTILE_CONTROL_KEY": key},
            stdin=subprocess.PIPE,
            stderr=errors,
            start_new_session=True,  # Ctrl-C in the terminal is for this process alone
        )
    family: set[tuple[int, str]] = set()
    try:
        ready = await _ready(process, log)
        control_url, agent_url = ready["control_url"], ready["agent_url"]
        yield LocalServer(control_url, agent_url, key, data_dir, ready["pid"], ready["sandboxes"])
    finally:
        family = descendants(process.pid)
        await _stop(process)
    left = family & running()
    if left:
        raise LocalServerError(f"processes left running by the server: {sorted(pid for pid, _ in left)}")
    if process.returncode != 0:
        raise LocalServerError(f"the server exited with {process.returncode}:\n{_tail(log)}")


def interrupt_on_termination() -> None:
    """From now on SIGTERM and SIGHUP end this process as Ctrl-C does: what it started is stopped first."""

    def interrupt(*_: object) -> None:
        if callable(signal.getsignal(signal.SIGINT)):
            signal.raise_signal(signal.SIGINT)
        else:  # a shell started this process in the background, with SIGINT ignored
            raise KeyboardInterrupt

    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_DFL:  # nohup ignores SIGHUP, and means it
            signal.signal(number, interrupt)


@contextlib.asynccontextmanager
async def stopped_at_exit(process: Waitable) -> AsyncIterator[None]:
    """Kill ``process`` and every process below it when the block ends, however it ends."""
    try:
        yield
    finally:
        family = descendants(process.pid)
        with anyio.CancelScope(shield=True):
            if process.returncode is None:
                process.kill()
                await process.wait()
        for pid, _ in family & running():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


async def _ready(process: Process, log: Path) -> dict[str, Any]:
    """The line of JSON that the server prints when it accepts requests."""
    assert process.stdout is not None
    try:
        with anyio.fail_after(START_S):
            line = await BufferedByteReceiveStream(process.stdout).receive_until(b"\n", MAX_READY_LINE)
    except TimeoutError:
        raise LocalServerError(f"the server was not ready after {START_S:g} s:\n{_tail(log)}") from None
    except anyio.IncompleteRead:
        raise LocalServerError(f"the server exited with {await process.wait()}:\n{_tail(log)}") from None
    ready: dict[str, Any] = json.loads(line)
    return ready


async def _stop(process: Process) -> None:
    with anyio.CancelScope(shield=True):
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        with anyio.move_on_after(STOP_S):
            await process.wait()
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.aclose()


def _tail(log: Path, lines: int = 20) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])


def running() -> set[tuple[int, str]]:
    """Every process that runs now, as (pid, start time): a pid alone may be used again."""
    return set(_parents())


def descendants(pid: int) -> set[tuple[int, str]]:
    """The processes below ``pid``, as (pid, start time)."""
    parents = _parents()
    family = {pid}
    while more := {child for child, _ in parents if parents[child, _] in family} - family:
        family |= more
    return {process for process in parents if process[0] in family - {pid}}


def _parents() -> dict[tuple[int, str], int]:
    """Parent pid by (pid, start time), from fields 4 and 22 of /proc/*/stat (proc(5)); zombies do not count."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue  # the process ended between the listing and the reading
        if fields[0] != "Z":
            parents[int(stat.parent.name), fields[19]] = int(fields[1])
    return parents
