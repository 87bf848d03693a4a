"""A tiny model and a private Turnstile server on this machine, for the demo and for tests.

What is started here is stopped here: `serve` returns only when the server and everything it started are gone,
and raises if they are not.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TURNSTILE = str(Path(sys.executable).with_name("turnstile"))
"""The installed command."""
MAKER = ROOT / "examples" / "make_tiny_model.py"
START_S = 180.0
STOP_S = 30.0


class LocalServerError(Exception):
    """The server did not start, or left something running."""


@dataclass(frozen=True, slots=True)
class LocalServer:
    """A running server: its two doors, the key of the control door, its process, its kind of sandboxes."""

    control_url: str
    agent_url: str
    control_key: str
    data_dir: Path
    pid: int
    sandboxes: str


def tiny_model(seed: int = 1) -> Path:
    """The folder of the tiny model with ``seed``: made once, kept in .cache until its maker changes."""
    digest = hashlib.sha256(MAKER.read_bytes()).hexdigest()[:12]
    folder = ROOT / ".cache" / f"tiny-{digest}-{seed}"
    if not (folder / "tokenizer.json").exists():
        partial = folder.with_name(f"{folder.name}.{os.getpid()}")
        subprocess.run([sys.executable, MAKER, partial, "--seed", str(seed)], check=True)
        try:
            partial.rename(folder)
        except OSError:  # another process was faster
            if not (folder / "tokenizer.json").exists():
                raise
    return folder


@contextlib.asynccontextmanager
async def serve(
    model: Path,
    data_dir: Path,
    *,
    engine_url: str | None = None,
    engine: str = "embedded",
    options: Sequence[str] = (),
) -> AsyncIterator[LocalServer]:
    """Runs `turnstile serve` on free ports; on ``engine``, or on the SGLang at ``engine_url``.

    The server's log is ``data_dir/../server.log``. Raises LocalServerError when the server does not become
    ready, exits with an error, or leaves a process behind.
    """
    samples = ["--engine", "sglang", "--engine-url", engine_url] if engine_url else ["--engine", engine]
    ports = ["--control-port", "0", "--agent-port", "0"]
    folders = ["--model", str(model), "--data-dir", str(data_dir)]
    key = secrets.token_urlsafe(24)
    log = data_dir.parent / "server.log"
    with log.open("ab") as errors:
        process = await asyncio.create_subprocess_exec(
            *(TURNSTILE, "serve", *samples, *ports, *folders, *options),
            env={**os.environ, "TURNSTILE_CONTROL_KEY": key},
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=errors,
        )
    family: set[tuple[int, str]] = set()
    try:
        ready = await _ready(process, log)
        yield LocalServer(ready["control_url"], ready["agent_url"], key, data_dir, process.pid, ready["sandboxes"])
    finally:
        family = descendants(process.pid)
        await _stop(process)
    left = family & running()
    if left:
        raise LocalServerError(f"processes left running by the server: {sorted(pid for pid, _ in left)}")
    if process.returncode != 0:
        raise LocalServerError(f"the server exited with {process.returncode}:\n{_tail(log)}")


@contextlib.asynccontextmanager
async def stopped_at_exit(process: asyncio.subprocess.Process) -> AsyncIterator[None]:
    """Ends ``process`` and everything below it, however the block is left."""
    try:
        yield
    finally:
        family = descendants(process.pid)
        if process.returncode is None:
            process.kill()
            await process.wait()
        for pid, _ in family & running():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


async def _ready(process: asyncio.subprocess.Process, log: Path) -> dict[str, str]:
    assert process.stdout is not None
    try:
        line = await asyncio.wait_for(process.stdout.readline(), START_S)
    except TimeoutError:
        raise LocalServerError(f"the server was not ready after {START_S:g} s:\n{_tail(log)}") from None
    if not line:
        raise LocalServerError(f"the server exited with {await process.wait()}:\n{_tail(log)}")
    ready: dict[str, str] = json.loads(line)
    return ready


async def _stop(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        process.terminate()
    try:
        await asyncio.wait_for(process.wait(), STOP_S)
    except TimeoutError:
        process.kill()
        await process.wait()


def _tail(log: Path, lines: int = 20) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])


def running() -> set[tuple[int, str]]:
    """Every process that runs now, as (pid, start time): a pid alone may be used again. Linux only."""
    return set(_parents())


def descendants(pid: int) -> set[tuple[int, str]]:
    """The processes below ``pid``, as (pid, start time)."""
    parents = _parents()
    family = {pid}
    while more := {child for child, _ in parents if parents[child, _] in family} - family:
        family |= more
    return {process for process in parents if process[0] in family - {pid}}


def _parents() -> dict[tuple[int, str], int]:
    """Parent pid by (pid, start time), from /proc/*/stat (fields 4 and 22, proc(5)); zombies do not count."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue  # ended between the listing and the reading
        if fields[0] != "Z":
            parents[int(stat.parent.name), fields[19]] = int(fields[1])
    return parents
