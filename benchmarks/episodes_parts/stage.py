"""A server with the mock engine, each a process of its own, and episodes that are played on it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx

from episodes_parts.cpu import Account
from episodes_parts.engine import TASK
from gate_parts.servers import free_port

HERE = Path(__file__).resolve().parent.parent
MODEL = HERE.parent / "env_server" / "turnstile_server" / "demo" / "tiny"
KEY = "benchmark-control-key"
START_S = 600.0
STOP_S = 60.0
ENDED = ("completed", "failed", "cancelled", "timed_out", "truncated")
PHASES = ("queue", "setup", "agent", "drain", "grading", "waited for a grader", "all")


class EpisodeFailure(Exception):
    """An episode did not end with the reward 1, or the server did not start."""


@dataclass(frozen=True)
class PlayedEpisode:
    """Seconds of each phase."""

    phases: Mapping[str, float]


class Stage:
    def __init__(self, folder: Path, installs: Path, *, agent: str, at_once: int, reply_s: float = 0.0) -> None:
        """``at_once``: the most episodes that will be open. ``reply_s``: seconds of the engine for a reply."""
        self._folder = folder
        self._installs = installs
        self._agent = agent
        self._at_once = at_once
        self._reply_s = reply_s
        self.url = f"http://127.0.0.1:{free_port()}"
        self._engine_url = f"http://127.0.0.1:{free_port()}"
        self._processes: list[subprocess.Popen[bytes]] = []
        self.account = Account(f"turnstile-episodes-{secrets.token_hex(4)}")

    async def __aenter__(self) -> Stage:
        port = self._engine_url.rpartition(":")[2]
        program = [sys.executable, "-m", "episodes_parts.engine"]
        self._spawn("engine", [*program, str(MODEL), port, str(self._reply_s)], {})
        # It waits until it is in its control group: what it starts is then in it, too.
        waiting = ["/bin/sh", "-c", 'read go; exec "$@"', "sh"]
        server = self._spawn("server", [*waiting, *self._serve_command()], self._env(), stdin=subprocess.PIPE)
        self.account.join(server.pid)
        assert server.stdin is not None
        server.stdin.write(b"go\n")
        server.stdin.close()
        self.pid = server.pid
        try:
            await self._ready(server)
        except BaseException:
            await self.__aexit__(None, None, None)
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in reversed(self._processes):
            process.send_signal(signal.SIGTERM)
            try:
                await asyncio.to_thread(process.wait, STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
        self.account.remove()

    @property
    def log(self) -> str:
        return (self._folder / "server.log").read_text(errors="replace")[-3000:]

    def client(self) -> httpx.AsyncClient:
        headers, limits = {"authorization": f"Bearer {KEY}"}, httpx.Limits(max_connections=None)
        return httpx.AsyncClient(base_url=self.url, headers=headers, limits=limits, timeout=120)

    async def hold(self) -> None:
        """Model calls wait from now on."""
        async with httpx.AsyncClient() as client:
            (await client.post(f"{self._engine_url}/hold")).raise_for_status()

    async def release(self) -> None:
        async with httpx.AsyncClient() as client:
            (await client.post(f"{self._engine_url}/release")).raise_for_status()

    async def running(self) -> int:
        async with self.client() as client:
            text = (await client.get("/metrics")).text
        prefix = 'turnstile_episodes{status="running"}'
        return next((int(float(line.split()[-1])) for line in text.splitlines() if line.startswith(prefix)), 0)

    async def play(self, client: httpx.AsyncClient) -> PlayedEpisode:
        """One episode to its end. Raises EpisodeFailure."""
        began = time.monotonic()
        asked = {"task": TASK, "agent": self._agent, "limits": {"max_turns": 8}}
        created = await client.post("/episodes", json=asked)
        if created.status_code not in (200, 201):
            raise EpisodeFailure(created.text)
        path = f"/episodes/{created.json()['episode_id']}"
        episode: dict[str, Any] = {}
        while episode.get("status") not in ENDED:
            episode = (await client.get(f"{path}?wait=60")).json()
        took = time.monotonic() - began
        if episode["status"] != "completed" or episode["reward"] != 1.0:
            raise EpisodeFailure(
                str({name: episode.get(name) for name in ("status", "reward", "error", "agent_output")})
            )
        spans = (await client.get(f"{path}/spans")).json()["spans"]
        return PlayedEpisode({**phases_of(spans), "all": took})

    def _serve_command(self) -> list[str]:
        options = {
            "--engine": "sglang",
            "--engine-url": self._engine_url,
            "--model": str(MODEL),
            "--data-dir": str(self._folder / "data"),
            "--control-port": self.url.rpartition(":")[2],
            "--agent-port": "0",
            "--log-level": "warning",
        }
        return [sys.executable, "-m", "turnstile", "serve", *(word for pair in options.items() for word in pair)]

    def _env(self) -> dict[str, str]:
        return {
            "TURNSTILE_CONTROL_KEY": KEY,
            "TURNSTILE_EPISODES__MAX_RUNNING": str(self._at_once),
            "TURNSTILE_SANDBOXES__MAX_OPEN": str(self._at_once + 16),
            "TURNSTILE_SANDBOXES__KIND": "local",
            "TURNSTILE_SANDBOXES__RUN_DIR": str(self._folder / "r"),
            "TURNSTILE_SANDBOXES__MEMORY_MB": "128",
            "TURNSTILE_SANDBOXES__START_TIMEOUT_S": "300",
            "TURNSTILE_AGENTS__INSTALL_DIR": str(self._installs),
        }

    def _spawn(
        self, name: str, command: list[str], env: dict[str, str], stdin: int = subprocess.DEVNULL
    ) -> subprocess.Popen[bytes]:
        inherited = {key: value for key, value in os.environ.items() if not key.startswith("TURNSTILE_")}
        with (self._folder / f"{name}.log").open("wb") as log:
            process = subprocess.Popen(
                command, cwd=HERE, stdin=stdin, stdout=log, stderr=log, env={**inherited, **env}
            )
        self._processes.append(process)
        return process

    async def _ready(self, server: subprocess.Popen[bytes]) -> None:
        async with asyncio.timeout(START_S), httpx.AsyncClient() as client:
            while server.poll() is None:
                with contextlib.suppress(httpx.HTTPError):
                    if (await client.get(self.url + "/ready")).status_code == 200:
                        return
                await asyncio.sleep(0.1)
        raise EpisodeFailure(self.log)


def phases_of(spans: list[dict[str, Any]]) -> dict[str, float]:
    """Seconds by phase, of an episode's spans; and how long its grading waited before a sandbox was asked for."""
    found: dict[str, float] = {}
    by_id = {span["span_id"]: span for span in spans}
    for span in spans:
        kind = span["kind"]
        if span["parent_id"] is None and kind in PHASES:
            found[kind] = found.get(kind, 0.0) + span["end_s"] - span["start_s"]
        if kind == "grader" and span["name"] == "attempt 1":
            found["waited for a grader"] = span["start_s"] - by_id[span["parent_id"]]["start_s"]
    return found
