"""Plays thousands of short episodes and says by how much the server's memory rises for each that has ended.

    python benchmarks/ended_episodes.py [--episodes 4000] [--at-once 128] [--kept-s N] [--write-docs]

Every episode is created as rollouts create theirs (a group, an idempotency key), asks the model twice, is
finished, and its samples are fetched: all that a server may keep of it is there. Its agent is this program
(``external``), so that nothing but the server is measured. A mock engine answers at once. After every ``--every``
ended episodes it reads the server's resident memory from ``/proc``.

*Rise*: the slope of a line through the samples behind ``--warm`` ended episodes, in bytes for each ended episode.
Exit code 1: it is above ``MOST_RISE``, or an episode did not complete.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from campaign.proc import status_field
from gate_parts.report import write_docs
from gate_parts.servers import free_port

HERE = Path(__file__).resolve().parent
DOCS = HERE.parent / "docs" / "performance.md"
MODEL = HERE.parent / "env_server" / "turnstile_server" / "demo" / "tiny"
TURNSTILE = str(Path(sys.executable).with_name("turnstile"))
KEY = "benchmark-control-key"
START_MARK, END_MARK = "<!-- benchmarks/ended_episodes.py writes from here -->", "<!-- to here, ended episodes -->"
MOST_RISE = 4096
"""Bytes of resident memory for each ended episode."""
START_S = 120.0
STOP_S = 60.0
TURNS = 2


@dataclass(frozen=True)
class Point:
    """One sample: episodes that have ended, seconds since the start, MiB resident."""

    ended: int
    at: float
    memory_mb: float


class Play:
    """One server, its mock engine, and the episodes played on it. ``program``: runs the ``turnstile`` command."""

    def __init__(self, folder: Path, at_once: int, program: tuple[str, ...] = (TURNSTILE,)) -> None:
        self._folder = folder
        self._at_once = at_once
        self._program = program
        self._control = f"http://127.0.0.1:{free_port()}"
        self._processes: list[subprocess.Popen[bytes]] = []
        self.pid = 0
        self.points: list[Point] = []
        self.ended = 0

    async def __aenter__(self) -> Play:
        engine_port = free_port()
        self._spawn("engine", [sys.executable, "-m", "gate_parts.engine", str(MODEL), str(engine_port)], {})
        server = self._spawn("server", self._serve_command(engine_port), self._env())
        self.pid = server.pid
        try:
            await self._ready(server)
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        for process in reversed(self._processes):
            process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                await asyncio.to_thread(process.wait, STOP_S)
            process.kill()
            process.wait()

    async def run(self, episodes: int, every: int) -> None:
        """Plays ``episodes`` more, with a sample after each ``every``."""
        left = iter(range(episodes))
        began = time.monotonic()
        limits = httpx.Limits(max_connections=None)
        headers = {"authorization": f"Bearer {KEY}"}
        async with (
            httpx.AsyncClient(base_url=self._control, headers=headers, limits=limits, timeout=120) as control,
            httpx.AsyncClient(limits=limits, timeout=120) as agent,
            asyncio.TaskGroup() as group,
        ):

            async def slot() -> None:
                for _ in left:
                    await _episode(control, agent, self.ended)
                    self.ended += 1
                    if self.ended % every == 0:
                        self.points.append(
                            Point(self.ended, time.monotonic() - began, status_field(self.pid, "VmRSS") / 1024)
                        )

            for _ in range(self._at_once):
                group.create_task(slot())

    def log(self) -> str:
        return (self._folder / "server.log").read_text(errors="replace")

    def _serve_command(self, engine_port: int) -> list[str]:
        options = {
            "--engine": "sglang",
            "--engine-url": f"http://127.0.0.1:{engine_port}",
            "--model": str(MODEL),
            "--data-dir": str(self._folder / "data"),
            "--control-port": self._control.rpartition(":")[2],
            "--agent-port": str(free_port()),
            "--durability": "process",
            "--log-level": "warning",
        }
        return [*self._program, "serve", *(word for pair in options.items() for word in pair)]

    def _env(self) -> dict[str, str]:
        many = str(self._at_once + 16)
        return {
            "TURNSTILE_CONTROL_KEY": KEY,
            "TURNSTILE_EPISODES__MAX_RUNNING": many,
            "TURNSTILE_SANDBOXES__KIND": "none",
        }

    def _spawn(self, name: str, command: list[str], env: dict[str, str]) -> subprocess.Popen[bytes]:
        inherited = {key: value for key, value in os.environ.items() if not key.startswith("TURNSTILE_")}
        with (self._folder / f"{name}.log").open("wb") as log:
            process = subprocess.Popen(command, cwd=HERE, stdout=log, stderr=log, env={**inherited, **env})
        self._processes.append(process)
        return process

    async def _ready(self, server: subprocess.Popen[bytes]) -> None:
        async with asyncio.timeout(START_S), httpx.AsyncClient() as client:
            while server.poll() is None:
                with contextlib.suppress(httpx.HTTPError):
                    if (await client.get(self._control + "/ready")).status_code == 200:
                        return
                await asyncio.sleep(0.1)
        raise SystemExit(self.log()[-2000:])


async def _episode(control: httpx.AsyncClient, agent: httpx.AsyncClient, number: int) -> None:
    """One, from its creation to the fetched samples. Raises httpx.HTTPError."""
    key = f"{number}-{time.monotonic_ns()}"
    body = {
        "task": {"instruction": f"Do the short task {key}."},
        "agent": "external",
        "group_id": f"group-{number // 8}",
        "idempotency_key": key,
    }
    created: dict[str, Any] = (await control.post("/episodes", json=body)).raise_for_status().json()
    headers = {"authorization": f"Bearer {created['episode_key']}"}
    messages: list[dict[str, Any]] = [{"role": "user", "content": f"Begin {key}."}]
    for turn in range(TURNS):
        asked = {"model": "policy", "messages": messages}
        url = created["model_url"] + "/v1/chat/completions"
        reply = (await agent.post(url, json=asked, headers=headers)).raise_for_status().json()
        said = {name: value for name, value in reply["choices"][0]["message"].items() if value is not None}
        messages += [said, {"role": "user", "content": f"Go on with step {turn} of {key}. {'word ' * 50}"}]
    path = f"/episodes/{created['episode_id']}"
    (await control.post(f"{path}/finish")).raise_for_status()
    (await control.get(f"{path}/samples")).raise_for_status()


def rise(points: list[Point], warm: int) -> float:
    """Bytes for each ended episode, behind the first ``warm``. Needs two samples there."""
    kept = [point for point in points if point.ended > warm]
    line = statistics.linear_regression([p.ended for p in kept], [p.memory_mb * (1 << 20) for p in kept])
    return float(line.slope)


def table(points: list[Point], warm: int, options: argparse.Namespace) -> list[str]:
    step = max(1, len(points) // 12)
    shown = [*points[::step], *([] if (len(points) - 1) % step == 0 else [points[-1]])]
    return [
        f"{os.cpu_count()} cores, Linux {platform.release()}, Python {platform.python_version()}; "
        f"{time.strftime('%Y-%m-%d')}; {points[-1].ended} episodes of {TURNS} turns, {options.at_once} at once.",
        "",
        "| ended | seconds | resident, MB |",
        "|---:|---:|---:|",
        *(f"| {point.ended} | {point.at:.0f} | {point.memory_mb:.0f} |" for point in shown),
        "",
        f"Behind the first {warm} it rises by {rise(points, warm) / 1024:.1f} KiB for each ended episode.",
    ]


async def play(options: argparse.Namespace) -> Play:
    with tempfile.TemporaryDirectory(prefix="ended-") as name:
        async with Play(Path(name), options.at_once) as played:
            await played.run(options.episodes, options.every)
    return played


def main() -> int:
    parser = argparse.ArgumentParser(description="What a server keeps of each episode that has ended.")
    parser.add_argument("--episodes", type=int, default=4000)
    parser.add_argument("--at-once", type=int, default=128)
    parser.add_argument("--warm", type=int, default=1000, help="ended episodes that are not judged")
    parser.add_argument("--every", type=int, default=100, help="ended episodes between two samples")
    parser.add_argument("--write-docs", action="store_true")
    options = parser.parse_args()
    played = asyncio.run(play(options))
    lines = table(played.points, options.warm, options)
    print("\n".join(lines))
    if options.write_docs:
        write_docs(DOCS, "\n".join(lines), START_MARK, END_MARK)
    return int(rise(played.points, options.warm) > MOST_RISE)


if __name__ == "__main__":
    sys.exit(main())
