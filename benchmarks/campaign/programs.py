"""The programs under fire: the engine and the server, each started again when it dies.

Owns both processes, their logs and the server's folders. ``Program.run`` starts the process and starts it again
until ``stop``; every end that nobody asked for is noted, because a server that dies by itself is a finding.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from campaign.clock import Clock
from campaign.crew import descriptors_of_all

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
MODEL = ROOT / "env_server" / "turnstile_server" / "demo" / "tiny"
KEY = "campaign-control-key"
START_S = 120.0
STOP_S = 60.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@dataclass(eq=False)
class Program:
    """``command``, ``env``: called anew at every start. ``probe``: the URL that answers 200 when it is ready."""

    name: str
    command: Callable[[], list[str]]
    env: Callable[[], dict[str, str]]
    probe: str
    log: Path
    before_start: Callable[[], None] = lambda: None
    excuse: Callable[[float], str | None] = lambda started: None
    """Why a process that was started then may have ended before it was ready; None: it may not."""
    starts: int = 0
    descriptors_when_ready: int = 0
    unexpected: list[str] = field(default_factory=list)
    expected_death: str | None = None
    """Why it may die now; noted by the fault that kills it."""
    _process: subprocess.Popen[bytes] | None = None
    _stopping: bool = False
    _task: asyncio.Task[None] | None = None
    _ready: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def pid(self) -> int | None:
        process = self._process
        return process.pid if process is not None and process.poll() is None else None

    @property
    def ready(self) -> bool:
        return self._ready.is_set() and self.pid is not None

    async def start(self) -> None:
        self._task = asyncio.create_task(self._run())
        await self.wait_ready()

    async def wait_ready(self, patience_s: float = START_S) -> None:
        """Raises TimeoutError."""
        async with asyncio.timeout(patience_s):
            while not self.ready:
                if self._task is not None and self._task.done():
                    self._task.result()
                await asyncio.sleep(0.02)

    async def _run(self) -> None:
        while not self._stopping:
            self.before_start()
            self.expected_death = None
            self.starts += 1
            with self.log.open("ab") as out:
                self._process = subprocess.Popen(
                    self.command(),
                    cwd=HERE.parent,
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=out,
                    env=self.env(),
                )
            started = time.monotonic()
            code: int | None = None
            while code is None:
                code = self._process.poll()
                if code is None and not self._ready.is_set():
                    if await self._answers():
                        self.descriptors_when_ready = descriptors_of_all(self._process.pid)
                        self._ready.set()
                    elif time.monotonic() - started > START_S:
                        self.unexpected.append(f"not ready {START_S:g} s after its start")
                        self._process.kill()
                await asyncio.sleep(0.05)
            excuse = None if self._ready.is_set() else self.excuse(started)
            self._ready.clear()
            if not self._stopping and self.expected_death is None and excuse is None:
                why = f"ended with {code} by itself: {self.last_words()}"
                self.unexpected += [why] if why not in self.unexpected else []
                await asyncio.sleep(1.0)

    async def _answers(self) -> bool:
        with contextlib.suppress(httpx.HTTPError):
            async with httpx.AsyncClient(timeout=2.0) as client:
                return (await client.get(self.probe)).status_code == 200
        return False

    def abandon(self) -> None:
        self._stopping = True
        if self._process is not None and self._process.poll() is None:
            self._process.kill()

    async def stop(self) -> int | None:
        """SIGTERM, after STOP_S SIGKILL; the exit code, None where it had to be killed."""
        self._stopping = True
        process = self._process
        if process is None:
            return 0
        process.send_signal(signal.SIGCONT)
        process.terminate()
        killed = False
        try:
            await asyncio.to_thread(process.wait, STOP_S)
        except subprocess.TimeoutExpired:
            killed = True
            process.kill()
            await asyncio.to_thread(process.wait)
        if self._task is not None:
            await self._task
        return None if killed else process.returncode

    def last_words(self) -> str:
        """The last line of its log, without a time."""
        return re.sub(r"^[\d:, -]{19,23} ", "", self.last_lines(1))

    def last_lines(self, count: int) -> str:
        with contextlib.suppress(OSError):
            return " | ".join(self.log.read_text(errors="replace").splitlines()[-count:])[:600]
        return ""


def inherited() -> dict[str, str]:
    """Without the settings of other servers; with the mark by which .ci/run finds what was left running."""
    return {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("TURNSTILE_") or name == "TURNSTILE_CI_RUN"
    }


def engine_program(folder: Path, port: int, log: Path, seed: int, name: str = "engine") -> Program:
    starts = iter(range(seed, seed + 1_000_000))

    def command() -> list[str]:
        numbers = [str(MODEL), str(port), str(log), str(next(starts))]
        return [sys.executable, "-m", "campaign.engine", *numbers]

    return Program(name, command, inherited, f"http://127.0.0.1:{port}/health", folder / f"{name}.log")


@dataclass(frozen=True)
class ServerSettings:
    """``folder``: of this backend; ``data`` below it may be a file system of its own. ``workers``: how many
    processes of the server own episodes."""

    backend: str
    workers: int
    folder: Path
    control_port: int
    agent_port: int
    engine_urls: tuple[str, ...]
    public_url: str
    docker_host: str | None
    docker_image: str | None
    clock: Clock
    transport: Callable[[], str]

    @property
    def data(self) -> Path:
        return self.folder / "data"

    @property
    def run_dir(self) -> Path:
        return self.folder / "r"

    @property
    def journals(self) -> list[Path]:
        """Folders that have the journal of one worker somewhere below them, and of no other one."""
        further = [self.data / "workers" / str(number) for number in range(1, self.workers)]
        return [self.data / "journal", *further]

    @property
    def control_url(self) -> str:
        return f"http://127.0.0.1:{self.control_port}"


def server_program(settings: ServerSettings) -> Program:
    def command() -> list[str]:
        options = {
            "--engine": "sglang",
            "--model": str(MODEL),
            "--data-dir": str(settings.data),
            "--control-port": str(settings.control_port),
            "--agent-port": str(settings.agent_port),
            "--agent-specs": str(HERE / "specs"),
            "--log-level": "info",
            "--workers": str(settings.workers),
        }
        pairs = [*options.items(), *(("--engine-url", url) for url in settings.engine_urls)]
        return [sys.executable, "-m", "turnstile", "serve", *(word for pair in pairs for word in pair)]

    def env() -> dict[str, str]:
        more = {
            "TURNSTILE_CONTROL_KEY": KEY,
            "TURNSTILE_STANDSTILL_S": "8",
            "TMPDIR": str(settings.folder / "tmp"),
            "TURNSTILE_GATE__PUBLIC_URL": settings.public_url,
            "TURNSTILE_GATE__DRAIN_S": "3",
            "TURNSTILE_GATE__MAX_REFUSALS": "30",
            "TURNSTILE_EPISODES__MAX_RUNNING": "12",
            # Workers are killed all the time; none is to be given up.
            "TURNSTILE_WORKERS__MAX_RESTARTS": "10000",
            "TURNSTILE_WORKERS__BACKOFF_CEILING_S": "0.5",
            "TURNSTILE_ENGINE__FIRST_CHUNK_TIMEOUT_S": "20",
            "TURNSTILE_ENGINE__CHUNK_TIMEOUT_S": "10",
            "TURNSTILE_ENGINE__CONTROL_TIMEOUT_S": "10",
            "TURNSTILE_JOURNAL__SEGMENT_BYTES": str(1 << 20),
            "TURNSTILE_JOURNAL__MIN_FREE_BYTES": str(1 << 20),
            # Nothing is deleted: every episode is checked once more at the end.
            "TURNSTILE_JOURNAL__RETENTION_SHARE": "0",
            "TURNSTILE_JOURNAL__RETENTION_FREE_BYTES": "0",
            "TURNSTILE_SANDBOXES__KIND": settings.backend,
            "TURNSTILE_SANDBOXES__RUN_DIR": str(settings.run_dir),
            "TURNSTILE_SANDBOXES__MEMORY_MB": "256",
            "TURNSTILE_SANDBOXES__START_TIMEOUT_S": "30",
            "TURNSTILE_SANDBOXES__CALL_TIMEOUT_S": "15",
            "TURNSTILE_SANDBOXES__DOCKER_TIMEOUT_S": "30",
            "TURNSTILE_SANDBOXES__WAIT_S": "60",
            "TURNSTILE_AGENTS__INSTALL_DIR": str(settings.folder / "agents"),
        }
        if settings.docker_host is not None:
            more["TURNSTILE_SANDBOXES__DOCKER_HOST"] = settings.docker_host
            more["TURNSTILE_SANDBOXES__DOCKER_IMAGE"] = settings.docker_image or ""
            more["TURNSTILE_SANDBOXES__DOCKER_TRANSPORT"] = settings.transport()
        return {**inherited(), **more, **settings.clock.env}

    return Program("server", command, env, settings.control_url + "/ready", settings.folder / "server.log")
