"""The measured servers: each is a process pinned to one core; everything else runs on the other core.

Owns the processes: ``Servers`` stops them in every case. A ``Server`` says where a call goes, with which headers,
and whose CPU time counts as the call's.
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
import urllib.request
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gate_parts.wire import Connection

HERE = Path(__file__).resolve().parent.parent
START_S = 90.0
STOP_S = 10.0
PEER = "rllm-model-gateway"
KEY = "benchmark-control-key"


@dataclass
class Process:
    """A child and the end of its log."""

    name: str
    popen: subprocess.Popen[bytes]
    log: Path

    def cpu_s(self) -> float:
        """CPU seconds of all its threads so far (the kernel's per-process clock, see clock_getcpuclockid(3))."""
        return time.clock_gettime((~self.popen.pid << 3) | 2)

    def check(self) -> None:
        if self.popen.poll() is not None:
            tail = "\n".join(self.log.read_text(errors="replace").splitlines()[-20:])
            raise SystemExit(f"{self.name} exited with {self.popen.returncode}:\n{tail}")


@dataclass
class Server:
    """``paths``: where an episode's call goes, and with which extra headers, one per episode."""

    name: str
    port: int
    process: Process
    paths: list[tuple[str, dict[str, str]]]
    control_url: str | None = None
    """Turnstile only: the control API."""
    traces_url: str | None = None
    """The peer only: its first recorded call."""
    grown: bool = False
    """It must see a history turn by turn before a call can continue it."""

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def head(self, episode: int, prompt_tokens: int) -> bytes:
        path, headers = self.paths[episode % len(self.paths)]
        lines = [f"POST {path} HTTP/1.1", "host: 127.0.0.1", "content-type: application/json"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        lines += [f"x-bench-tokens: {prompt_tokens}", ""]
        return "\r\n".join(lines).encode()

    async def new_episode(self) -> tuple[str, dict[str, str]]:
        """Turnstile only: the path and headers of the model calls of an episode of an external agent."""
        task = {"task": {"instruction": "benchmark"}, "agent": "external"}
        created = json.loads(await asyncio.to_thread(fetch, f"{self.control_url}/episodes", task))
        path = created["model_url"].removeprefix(self.base_url) + "/v1/chat/completions"
        return path, {"authorization": f"Bearer {created['episode_key']}"}

    async def metrics(self) -> dict[str, float]:
        """Turnstile's unlabelled counters, labelled ones summed; empty for the others."""
        if self.control_url is None:
            return {}
        text = (await asyncio.to_thread(fetch, self.control_url + "/metrics")).decode()
        totals: dict[str, float] = {}
        for line in text.splitlines():
            if not line.startswith("#"):
                name, _, value = line.rpartition(" ")
                name = name.partition("{")[0]
                totals[name] = totals.get(name, 0.0) + float(value)
        return totals


class Servers:
    """Starts processes in ``folder`` (logs, data) and stops them all at the end. ``cores``: server's, ours."""

    def __init__(self, folder: Path, model: Path, cores: tuple[int, int], episodes: int) -> None:
        self._folder = folder
        self._model = model
        self._cores = cores
        self._episodes = episodes
        self._processes: list[Process] = []
        self.engine_port = 0

    async def __aenter__(self) -> Servers:
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
            try:
                await asyncio.to_thread(process.popen.wait, STOP_S)
            except subprocess.TimeoutExpired:
                process.popen.kill()
                process.popen.wait()

    def direct(self) -> Server:
        return Server("direct", self.engine_port, self._engine, [("/v1/chat/completions", {})])

    async def relay(self) -> Server:
        port = free_port()
        command = [sys.executable, "-m", "gate_parts.relay", f"http://127.0.0.1:{self.engine_port}", str(port)]
        process = self._spawn("relay", command, self._cores[0])
        await self._ready(process, port, "/")
        return Server("relay", port, process, [("/v1/chat/completions", {})])

    async def turnstile(self, durability: str) -> Server:
        control, agent = free_port(), free_port()
        data = self._folder / f"turnstile-{durability}"
        options = {
            "--engine": "sglang",
            "--engine-url": f"http://127.0.0.1:{self.engine_port}",
            "--model": str(self._model),
            "--data-dir": str(data),
            "--control-port": str(control),
            "--agent-port": str(agent),
            "--durability": durability,
            "--log-level": "warning",
        }
        executable = str(Path(sys.executable).with_name("turnstile"))
        command = [executable, "serve", *(word for pair in options.items() for word in pair)]
        unlimited = {
            "TURNSTILE_EPISODES__MAX_TURNS": "10000000",
            "TURNSTILE_EPISODES__MAX_SAMPLED_TOKENS": "1000000000",
        }
        name = f"turnstile-{durability}"
        process = self._spawn(name, command, self._cores[0], {**unlimited, "TURNSTILE_CONTROL_KEY": KEY})
        await self._ready(process, control, "/ready")
        server = Server(name, agent, process, [], control_url=f"http://127.0.0.1:{control}", grown=True)
        server.paths += [await server.new_episode() for _ in range(self._episodes)]
        return server

    async def peer(self, store: str, venv: Path) -> Server:
        port = free_port()
        options = {
            "--host": "127.0.0.1",
            "--port": str(port),
            "--worker": f"http://127.0.0.1:{self.engine_port}/v1",
            "--store": store,
            "--db-path": str(self._folder / "peer.sqlite3"),
            "--log-level": "WARNING",
        }
        command = [str(venv / "bin" / PEER), *(word for pair in options.items() for word in pair)]
        process = self._spawn(f"peer-{store}", command, self._cores[0])
        await self._ready(process, port, "/health")
        paths: list[tuple[str, dict[str, str]]] = [
            (f"/sessions/s{index}/v1/chat/completions", {}) for index in range(self._episodes)
        ]
        traces = f"http://127.0.0.1:{port}/sessions/s0/traces?limit=1"
        return Server(f"peer-{store}", port, process, paths, traces_url=traces)

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
                return
            if time.monotonic() > deadline:
                raise SystemExit(f"{process.name} was not ready within {START_S:g} s; its log is {process.log}")
            await asyncio.sleep(0.1)


@contextlib.asynccontextmanager
async def connections(server: Server, count: int) -> AsyncIterator[list[Connection]]:
    opened = [await Connection.open(server.port) for _ in range(count)]
    try:
        yield opened
    finally:
        for connection in opened:
            connection.close()


def fetch(url: str, body: dict[str, Any] | None = None) -> bytes:
    data = None if body is None else json.dumps(body).encode()
    headers = {"authorization": f"Bearer {KEY}", "content-type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(url, data, headers), timeout=60) as answer:
        content: bytes = answer.read()
        return content


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def install_peer(venv: Path) -> str:
    """Installs the peer into a virtual environment of its own, once; returns its version."""
    python = str(venv / "bin" / "python")
    if not (venv / "bin" / PEER).exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(venv)], check=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", "--quiet", PEER], check=True)
    script = f"from importlib.metadata import version; print(version({PEER!r}))"
    return subprocess.run([python, "-c", script], check=True, capture_output=True, text=True).stdout.strip()
