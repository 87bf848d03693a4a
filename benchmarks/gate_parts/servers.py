"""The measured servers: each is a process pinned to one core; everything else runs on the other core.

Owns the processes: ``Servers`` stops them in every case.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from gate_parts.peers import Peer, Site
from gate_parts.process import Process
from gate_parts.server import KEY, Server, fetch

HERE = Path(__file__).resolve().parent.parent
START_S = 300.0
STOP_S = 10.0
UNLIMITED = {
    "TURNSTILE_EPISODES__MAX_RUNNING": "4096",
    "TURNSTILE_EPISODES__MAX_TURNS": "10000000",
    "TURNSTILE_EPISODES__MAX_SAMPLED_TOKENS": "1000000000",
}


class Servers:
    """Starts processes in ``folder`` (logs, data) and stops them all at the end. ``cores``: server's, ours.
    ``engine_url``: an engine that runs already; else a mock one is started."""

    def __init__(
        self, folder: Path, model: Path, cores: tuple[int, int], episodes: int, engine_url: str | None = None
    ) -> None:
        self._folder = folder
        self._model = model
        self._cores = cores
        self._episodes = episodes
        self._processes: list[Process] = []
        self._engine_url = engine_url
        self.engine_port = 0

    @property
    def engine_url(self) -> str:
        return self._engine_url or f"http://127.0.0.1:{self.engine_port}"

    async def __aenter__(self) -> Servers:
        if self._engine_url is not None:
            return self
        self.engine_port = free_port()
        command = [sys.executable, "-m", "gate_parts.engine", str(self._model), str(self.engine_port)]
        self._engine = self._spawn("mock engine", command, self._cores[1])
        try:
            await self._ready(self._engine, self.engine_port, "/health")
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        for process in reversed(self._processes):
            if process.popen.poll() is None:
                process.popen.send_signal(signal.SIGTERM)
        for process in self._processes:
            await _wait(process)

    async def stop(self, process: Process) -> None:
        """Ends one of them before the others."""
        process.popen.send_signal(signal.SIGTERM)
        await _wait(process)

    def direct(self) -> Server:
        return Server("direct", self.engine_port, self._engine, [("/v1/chat/completions", {})])

    async def relay(self, wrapper: Sequence[str] = ()) -> Server:
        port = free_port()
        command = ["gate_parts.relay", self.engine_url, str(port)]
        process = self._spawn("relay", [sys.executable, "-m", *wrapper, *command], self._cores[0])
        await self._ready(process, port, "/")
        return Server("relay", port, process, [("/v1/chat/completions", {})])

    async def turnstile(
        self, durability: str, *, name: str | None = None, wrapper: Sequence[str] = (), episodes: int | None = None
    ) -> Server:
        """``wrapper``: a module, and its arguments, that runs the module that it is given. ``name``: of logs and
        data, for a second one."""
        control, agent = free_port(), free_port()
        name = name or f"turnstile-{durability}"
        options = {
            "--engine": "sglang",
            "--engine-url": self.engine_url,
            "--model": str(self._model),
            "--data-dir": str(self._folder / name),
            "--control-port": str(control),
            "--agent-port": str(agent),
            "--durability": durability,
            "--log-level": "warning",
        }
        executable = [str(Path(sys.executable).with_name("turnstile"))]
        if wrapper:
            executable = [sys.executable, "-m", *wrapper, "turnstile"]
        command = [*executable, "serve", *(word for pair in options.items() for word in pair)]
        process = self._spawn(name, command, self._cores[0], {**UNLIMITED, "TURNSTILE_CONTROL_KEY": KEY})
        await self._ready(process, control, "/ready")
        server = Server(name, agent, process, [], control_url=f"http://127.0.0.1:{control}", grown=True)
        count = self._episodes if episodes is None else episodes
        server.paths += [await server.new_episode() for _ in range(count)]
        return server

    async def peer(self, peer: Peer) -> Server:
        site = Site(self.engine_url, free_port(), self._folder, self._model, self._episodes)
        process = self._spawn(peer.name, peer.command(site), self._cores[0])
        await self._ready(process, site.port, peer.ready_path)
        return peer.server(site, process)

    async def pace_engine(self, on: bool) -> None:
        """Whether the mock engine streams as a model does, token after token (``gate_parts.engine``)."""
        await asyncio.to_thread(fetch, f"{self.engine_url}/bench/pace", on)

    async def first_tokens(self) -> list[float]:
        """When the mock engine wrote the first tokens of paced replies, since this was last asked."""
        content = await asyncio.to_thread(fetch, f"{self.engine_url}/bench/first-tokens")
        stamps: list[float] = json.loads(content)
        return stamps

    def _spawn(self, name: str, command: list[str], core: int, env: dict[str, str] | None = None) -> Process:
        log = self._folder / f"{name.replace(' ', '-')}.log"
        before = os.sched_getaffinity(0)
        os.sched_setaffinity(0, {core})  # inherited by the child, threads and all
        try:
            with log.open("wb") as out:
                popen = subprocess.Popen(
                    command, cwd=HERE, stdout=out, stderr=out, env={**os.environ, **(env or {})}
                )
        finally:
            os.sched_setaffinity(0, before)
        process = Process(name, popen, log)
        self._processes.append(process)
        return process

    async def _ready(self, process: Process, port: int, path: str) -> None:
        deadline = time.monotonic() + START_S
        while True:
            process.check()
            with contextlib.suppress(OSError):
                await asyncio.to_thread(fetch, f"http://127.0.0.1:{port}{path}")
                process.adopt_children()
                return
            if time.monotonic() > deadline:
                raise SystemExit(f"{process.name} was not ready within {START_S:g} s; its log is {process.log}")
            await asyncio.sleep(0.1)


async def _wait(process: Process) -> None:
    try:
        await asyncio.to_thread(process.popen.wait, STOP_S)
    except subprocess.TimeoutExpired:
        process.popen.kill()
        process.popen.wait()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
