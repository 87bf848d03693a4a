"""A capture gateway under test: how it is started, called, killed and read. One module each implements it.

``GatewayProcess`` owns the process, on one port, from its start to its end; a gateway owns its own wire.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, Protocol

import httpx

from exactness.count import Row
from exactness.dialects import Endpoint
from gate_parts.process import cpu_s, descendants

HOST: Final = "127.0.0.1"
START_S: Final = 180.0
STOP_S: Final = 10.0


class NotComparable(Exception):
    """The gateway as published cannot be run in front of this engine. Says why."""


class Gateway(Protocol):
    """``engine_wire``: which of the stand-in's wires it speaks. ``missing``: dialects that it does not capture,
    and why. ``promise``: what its own documents say that it does, in a sentence or two."""

    @property
    def name(self) -> str: ...

    @property
    def package(self) -> str:
        """Its distribution, whose version the report gives."""

    @property
    def python(self) -> Path:
        """That of its environment."""

    @property
    def engine_wire(self) -> str: ...

    @property
    def missing(self) -> Mapping[str, str]: ...

    @property
    def promise(self) -> str: ...

    @property
    def process(self) -> GatewayProcess: ...

    async def start(self, engine_url: str) -> None:
        """Raises NotComparable."""

    async def open_episode(self) -> tuple[str, Endpoint]:
        """A new episode's id, and where its agents find their model."""

    async def collect(self, episode: str) -> list[Row]:
        """Ends the episode; the rows that a trainer gets of it. After a crash, what is left; without the episode,
        none. May be called once."""


class GatewayProcess:
    """A command that serves on ``port``. Logs go to ``folder``."""

    def __init__(self, name: str, folder: Path) -> None:
        self.port = free_port()
        self.url = f"http://{HOST}:{self.port}"
        self._name = name
        self._folder = folder
        self._popen: subprocess.Popen[bytes] | None = None
        self._command: list[str] = []
        self._ready_url = ""
        self._env: dict[str, str] = {}

    async def start(self, command: Sequence[str], ready_url: str, env: Mapping[str, str] | None = None) -> None:
        """Returns when ``ready_url`` answers 200. Raises NotComparable with the log's end if it never does."""
        self._command, self._ready_url, self._env = list(command), ready_url, dict(env or {})
        await self._start()

    async def kill_and_restart(self) -> None:
        """SIGKILL for it and all that it started, and the same command again."""
        if self._popen is not None:
            os.killpg(self._popen.pid, signal.SIGKILL)
            self._popen.wait()
        await self._start()

    async def stop(self) -> None:
        if self._popen is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._popen.pid, signal.SIGTERM)
        try:
            await asyncio.to_thread(self._popen.wait, STOP_S)
        except subprocess.TimeoutExpired:
            os.killpg(self._popen.pid, signal.SIGKILL)
            self._popen.wait()
        self._popen = None

    def cpu_s(self) -> float:
        """CPU seconds so far, of it and of the processes that it started."""
        assert self._popen is not None
        return sum(cpu_s(pid) for pid in (self._popen.pid, *descendants(self._popen.pid)))

    def _spawn(self) -> tuple[subprocess.Popen[bytes], Path]:
        """Starts the command, in a process group of its own. Returns it and its log."""
        log = self._folder / f"{self._name}.log"
        inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        with log.open("ab") as out:
            popen = subprocess.Popen(
                self._command,
                cwd=self._folder,
                stdout=out,
                stderr=out,
                env={**inherited, **self._env},
                start_new_session=True,
            )
        return popen, log

    async def _start(self) -> None:
        popen, log = self._spawn()
        self._popen = popen
        deadline = time.monotonic() + START_S
        async with httpx.AsyncClient(timeout=5) as http:
            while True:
                with contextlib.suppress(httpx.TransportError):
                    if (await http.get(self._ready_url)).status_code == 200:
                        return
                if popen.poll() is not None or time.monotonic() > deadline:
                    tail = " / ".join(log.read_text(errors="replace").splitlines()[-3:])
                    raise NotComparable(f"it does not start: {tail[-300:]}")
                await asyncio.sleep(0.1)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
        return port


def merged(turns: Sequence[tuple[Sequence[int], Sequence[int], Sequence[float | None]]]) -> list[Row]:
    """Rows of calls ``(prompt, completion, logprobs)`` in their order: a call whose prompt begins with all ids of
    the row so far goes on with it, any other begins the next row. Versions are not recorded."""
    rows: list[Row] = []
    ids: list[int] = []
    mask: list[int] = []
    logprobs: list[float | None] = []

    def close() -> None:
        if ids:
            rows.append(Row(tuple(ids), tuple(mask), tuple(logprobs), (None,) * len(ids)))

    for prompt, completion, known in turns:
        if not ids or list(prompt[: len(ids)]) != ids:
            close()
            ids, mask, logprobs = [], [], []
        new = list(prompt[len(ids) :])
        ids += [*new, *completion]
        mask += [0] * len(new) + [1] * len(completion)
        logprobs += [None] * len(new) + list(known)
    close()
    return rows
