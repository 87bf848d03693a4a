"""Holds many light episodes at once for minutes and says whether the server stays as it is.

    python benchmarks/soak.py [--episodes 256] [--minutes 10] [--stay-s 120] [--write-docs]

Every episode has a sandbox of its own (bubblewrap) with a page of Python that asks the model now and then; when
one ends, the next begins. A mock engine answers at once. Every few seconds it samples from outside: the server's
resident memory, descriptors and threads (/proc), its open episodes (metrics) and its asyncio tasks
(``soak_parts/serve.py``).

*Flat*: a line through the samples, from the moment at which the server is full and its caches are (``--warm-s``),
rises by no more than ``RISE`` of their median; threads never number more than ``MOST_THREADS``. Exit code 1:
something was not flat, an episode did not complete, or the server was never full.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import platform
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from campaign.proc import descriptors, status_field
from gate_parts.report import write_docs
from gate_parts.servers import free_port

HERE = Path(__file__).resolve().parent
DOCS = HERE.parent / "docs" / "performance.md"
MODEL = HERE.parent / "env_server" / "turnstile_server" / "demo" / "tiny"
KEY = "benchmark-control-key"
START_MARK, END_MARK = "<!-- benchmarks/soak.py writes from here -->", "<!-- to here, soak -->"
RISE = 0.05
MOST_THREADS = 64
"""Threads come and go with pools that are bounded, so a line through a few dozen of them says nothing."""
FULL = 0.9
"""The server counts as full from the time when so many of the wanted episodes run."""
MEASURES = ("memory_mb", "descriptors", "threads", "tasks")
ENDED = ("completed", "failed", "cancelled", "timed_out", "truncated")


@dataclass(frozen=True)
class Moment:
    """One sample; ``at`` in seconds from the start of the soak."""

    at: float
    running: int
    ended: int
    memory_mb: float
    descriptors: float
    threads: float
    tasks: float
    of: dict[str, int]


class Soak:
    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self._options = options
        self._folder = folder
        self._url = f"http://127.0.0.1:{free_port()}"
        self._window = folder / "w"
        self._started = 0.0
        self.moments: list[Moment] = []
        self.ended = Counter[str]()
        self.errors = Counter[str]()
        self.tail = Moment(0, 0, 0, 0, 0, 0, 0, {})

    async def run(self) -> None:
        engine_port = free_port()
        engine = self._spawn(
            "engine", [sys.executable, "-m", "gate_parts.engine", str(MODEL), str(engine_port)], {}
        )
        server = self._spawn("server", self._serve_command(engine_port), self._env())
        try:
            await self._ready(server)
            self._started = time.monotonic()
            until = self._started + self._options.minutes * 60
            async with self._client() as client, asyncio.TaskGroup() as group:
                sampler = group.create_task(self._sample(server.pid))
                slots = [group.create_task(self._slot(client, n, until)) for n in range(self._options.episodes)]
                await asyncio.wait(slots)
                sampler.cancel()
            await asyncio.sleep(self._options.every_s)
            self.tail = await self._moment(server.pid)
        finally:
            for process in (server, engine):
                process.send_signal(signal.SIGTERM)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    await asyncio.to_thread(process.wait, 60)
                process.kill()

    def _client(self) -> httpx.AsyncClient:
        headers, limits = {"authorization": f"Bearer {KEY}"}, httpx.Limits(max_connections=None)
        return httpx.AsyncClient(base_url=self._url, headers=headers, limits=limits, timeout=90)

    def _serve_command(self, engine_port: int) -> list[str]:
        options = {
            "--engine": "sglang",
            "--engine-url": f"http://127.0.0.1:{engine_port}",
            "--model": str(MODEL),
            "--data-dir": str(self._folder / "data"),
            "--control-port": self._url.rpartition(":")[2],
            "--agent-port": "0",
            "--agent-specs": str(HERE / "soak_parts" / "specs"),
            "--log-level": "warning",
        }
        words = [word for pair in options.items() for word in pair]
        return [sys.executable, "-m", "soak_parts.serve", str(self._window), "serve", *words]

    def _env(self) -> dict[str, str]:
        many = str(self._options.episodes + 16)
        return {
            "TURNSTILE_CONTROL_KEY": KEY,
            "TURNSTILE_EPISODES__MAX_RUNNING": many,
            "TURNSTILE_SANDBOXES__MAX_OPEN": many,
            "TURNSTILE_SANDBOXES__KIND": "local",
            "TURNSTILE_SANDBOXES__RUN_DIR": str(self._folder / "r"),
            "TURNSTILE_SANDBOXES__MEMORY_MB": "64",
            "TURNSTILE_SANDBOXES__START_TIMEOUT_S": "300",
            "TURNSTILE_AGENTS__INSTALL_DIR": str(self._folder / "agents"),
        }

    def _spawn(self, name: str, command: list[str], env: dict[str, str]) -> subprocess.Popen[bytes]:
        inherited = {key: value for key, value in os.environ.items() if not key.startswith("TURNSTILE_")}
        with (self._folder / f"{name}.log").open("wb") as log:
            return subprocess.Popen(command, cwd=HERE, stdout=log, stderr=log, env={**inherited, **env})

    async def _ready(self, server: subprocess.Popen[bytes]) -> None:
        async with asyncio.timeout(120), httpx.AsyncClient() as client:
            while server.poll() is None:
                with contextlib.suppress(httpx.HTTPError):
                    if (await client.get(self._url + "/ready")).status_code == 200:
                        return
                await asyncio.sleep(0.1)
        raise SystemExit((self._folder / "server.log").read_text()[-2000:])

    async def _slot(self, client: httpx.AsyncClient, number: int, until: float) -> None:
        """One episode after another. The first ones are spread over the length of one, and so are the ends."""
        stay_s = self._options.stay_s
        turns = 8
        await asyncio.sleep(stay_s * number / self._options.episodes)
        while time.monotonic() < until:
            body = {"task": {"instruction": f"{turns} {stay_s / turns:.2f}"}, "agent": "light"}
            created = (await client.post("/episodes", json=body)).json()
            episode: dict[str, Any] = {}
            while episode.get("status") not in ENDED:
                episode = (await client.get(f"/episodes/{created['episode_id']}?wait=60")).json()
            self.ended[episode["status"]] += 1
            if episode["error"] is not None:
                self.errors[str(episode["error"])[:300]] += 1

    async def _sample(self, pid: int) -> None:
        while True:
            self.moments.append(await self._moment(pid))
            await asyncio.sleep(self._options.every_s)

    async def _moment(self, pid: int) -> Moment:
        seen = await asyncio.to_thread(self._look)
        return Moment(
            at=time.monotonic() - self._started,
            running=await self._running(),
            ended=self.ended.total(),
            memory_mb=status_field(pid, "VmRSS") / 1024,
            descriptors=descriptors(pid),
            threads=status_field(pid, "Threads"),
            tasks=seen["tasks"],
            of=seen["of"],
        )

    def _look(self) -> dict[str, Any]:
        with socket.socket(socket.AF_UNIX) as window:
            window.connect(str(self._window))
            with window.makefile("rb") as answer:
                found: dict[str, Any] = json.load(answer)
                return found

    async def _running(self) -> int:
        async with self._client() as client:
            text = (await client.get("/metrics")).text
        prefix = 'turnstile_episodes{status="running"}'
        return next((int(float(line.split()[-1])) for line in text.splitlines() if line.startswith(prefix)), 0)


def full(moments: list[Moment], episodes: int, warm_s: float) -> list[Moment]:
    """The samples of a full server, from ``warm_s`` after the first one to the last one."""
    at = [moment.at for moment in moments if moment.running >= FULL * episodes]
    return [moment for moment in moments if at and at[0] + warm_s <= moment.at <= at[-1]]


def rise(moments: list[Moment], measure: str) -> float:
    """By how much a line through the samples rises over their time, as a share of their median."""
    values = [getattr(moment, measure) for moment in moments]
    slope: float = statistics.linear_regression([moment.at for moment in moments], values).slope
    return float(slope * (moments[-1].at - moments[0].at) / statistics.median(values))


def table(soak: Soak, kept: list[Moment], options: argparse.Namespace) -> list[str]:
    lines = [
        f"{os.cpu_count()} cores, Linux {platform.release()}, Python {platform.python_version()}; load average "
        f"{os.getloadavg()[1]:.1f} (5 minutes); {time.strftime('%Y-%m-%d')}; {options.episodes} episodes at once "
        f"for {options.minutes:g} minutes, {soak.ended.total()} in all: "
        + ", ".join(f"{count} {status}" for status, count in soak.ended.items())
        + ".",
        "",
        "| seconds | running | ended | memory MB | descriptors | threads | tasks |",
        "|---:|---:|---:|---:|---:|---:|---:|",
    ]
    step = max(1, len(soak.moments) // 12)
    for moment in [*soak.moments[::step], soak.tail]:
        lines.append(
            f"| {moment.at:.0f} | {moment.running} | {moment.ended} | {moment.memory_mb:.0f} | "
            f"{moment.descriptors:.0f} | {moment.threads:.0f} | {moment.tasks:.0f} |"
        )
    lines += ["", f"| from {kept[0].at:.0f} to {kept[-1].at:.0f} s | median | rises by |", "|---|---:|---:|"]
    for measure in MEASURES:
        median = statistics.median(getattr(moment, measure) for moment in kept)
        lines.append(f"| {measure.replace('_mb', ', MB')} | {median:.0f} | {rise(kept, measure):+.1%} |")
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description="Many light episodes at once, and what the server costs.")
    parser.add_argument("--episodes", type=int, default=256)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--stay-s", type=float, default=120.0, help="length of an episode")
    parser.add_argument("--warm-s", type=float, default=90.0, help="not judged after the server is full")
    parser.add_argument("--every-s", type=float, default=5.0, help="between two samples")
    parser.add_argument("--write-docs", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="soak-") as name:
        soak = Soak(options, Path(name))
        try:
            asyncio.run(soak.run())
        except* httpx.HTTPError as errors:
            soak.errors[f"{type(errors.exceptions[0]).__name__}: {errors.exceptions[0]}"] += len(errors.exceptions)
        log = (Path(name) / "server.log").read_text(errors="replace")
    kept = full(soak.moments, options.episodes, options.warm_s)
    if len(kept) < 3:
        print(
            f"the server was never full: {[moment.running for moment in soak.moments]}", soak.errors, log[-2000:]
        )
        return 1
    lines = table(soak, kept, options)
    print("\n".join(lines), f"\n\ntasks at the end: {kept[-1].of}\nafter it: {soak.tail.of}")
    steep = [measure for measure in MEASURES if measure != "threads" and rise(kept, measure) > RISE]
    if max(moment.threads for moment in soak.moments) > MOST_THREADS:
        steep.append("threads")
    bad = {status: count for status, count in soak.ended.items() if status != "completed"}
    if steep or bad or soak.errors:
        print(f"not flat: {steep}; not completed: {bad} {dict(soak.errors)}\n{log[-2000:]}")
        return 1
    if options.write_docs:
        write_docs(DOCS, "\n".join(lines), START_MARK, END_MARK)
    print("flat")
    return 0


if __name__ == "__main__":
    sys.exit(main())
