"""Measures what the MCP endpoint adds to a command, against running it with the sandbox's helper directly.

    python benchmarks/tools.py [--docker IMAGE] [--calls N] [--out DIR]

In one run, call by call in turns, in a local sandbox (bubblewrap) and, with IMAGE, in a Docker container: the
sandbox's own `exec`; the engine's exec (`docker exec`, Docker only); and the `bash` tool called by the official
`mcp` client over HTTP on TCP, in a session (protocol 2025-11-25) and without (2026-07-28). Each runs the same
commands. The difference of the medians is what the endpoint costs, the client's part included: client and server
share one process and one event loop. `cpu` is the processor time of that process per call, which other work on the
machine changes little.

Needs Linux. Writes tools.json and tools.md into benchmarks/results/.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import anyio
import httpx2
import mcp
from mcp.client.streamable_http import streamable_http_client

from turnstile.models import SpanKind
from turnstile_server.errors import NotFound
from turnstile_server.http.agent_endpoint import HttpAgentEndpoint
from turnstile_server.http.intake import Intake
from turnstile_server.http.listeners import Listener, bind, url_of
from turnstile_server.http.origins import OriginRules
from turnstile_server.http.stopping import Stopping
from turnstile_server.http.wrong_keys import WrongKeys
from turnstile_server.sandboxes.background import BackgroundTasks
from turnstile_server.sandboxes.docker.provider import DockerProvider
from turnstile_server.sandboxes.local.provider import LocalProvider
from turnstile_server.sandboxes.protocol import Command, Sandbox, SandboxLimits, SandboxProvider, SandboxSpec
from turnstile_server.settings import GateSettings, SandboxSettings, ToolSettings
from turnstile_server.spans import OpenSpan, SpanRecorder
from turnstile_server.tools.endpoint import McpEndpoint
from turnstile_server.tools.protocol import EpisodeTools, ServedTool
from turnstile_server.tools.toolbox import Toolbox

HERE = Path(__file__).resolve().parent
KEY = "benchmark"
COMMANDS = {"true": "true", "10 kB of output": "seq 1 2040", "50 ms of sleep": "sleep 0.05"}
ERAS = {"MCP, 2025-11-25": "legacy", "MCP, 2026-07-28": "2026-07-28"}
TARGET_MS = 5.0
SPEC = SandboxSpec(SandboxLimits(memory_bytes=512 << 20, cpus=2.0, pids=128, disk_bytes=64 << 20))
Call = Callable[[], Awaitable[None]]


@dataclass(frozen=True)
class Row:
    """Milliseconds; ``cpu``: of this process, per call; ``added``, ``ratio``: against the sandbox's own exec."""

    backend: str
    command: str
    subject: str
    calls: int
    p50: float
    p95: float
    cpu: float
    added: float
    ratio: float


class OneEpisode:
    """Implements EpisodeTools and ToolDirectory, for one episode that never ends."""

    episode_id = "benchmark"
    own_tools: Sequence[ServedTool] = ()

    def __init__(self, sandbox: Sandbox) -> None:
        self.sandbox: Sandbox | None = sandbox
        self._spans = SpanRecorder(time.time(), 1_000_000)

    has_user = False
    plain_tools = False

    async def submit(self, answer: str) -> str | None: ...

    def check_open(self) -> None: ...

    def recorded(self, tool: str, bytes_in: int) -> AbstractContextManager[OpenSpan]:
        return self._spans.span(SpanKind.TOOL, tool, bytes_in=bytes_in)

    async def stop_requested(self) -> None:
        await anyio.sleep_forever()

    def open_tools(self, episode_id: str, key: str) -> EpisodeTools:
        if (episode_id, key) != (self.episode_id, KEY):
            raise NotFound("there is one episode here")
        return self


@asynccontextmanager
async def door_url(sandbox: Sandbox) -> AsyncIterator[str]:
    episode, settings = OneEpisode(sandbox), ToolSettings()
    toolbox, origins = Toolbox(settings), OriginRules.of("gate", GateSettings())
    bound = bind("agent", "127.0.0.1", 0)
    intake = Intake("gate", GateSettings())
    async with (
        McpEndpoint(episode, toolbox, settings, origins, intake, Stopping(), WrongKeys()) as endpoint,
        anyio.create_task_group() as tasks,
    ):
        listener = Listener(endpoint, bound, idle_s=60, grace_s=1, access_log=False)
        tasks.start_soon(listener.serve)
        try:
            yield f"{url_of(bound)}/e/{episode.episode_id}/mcp"
        finally:
            listener.stop()
    listener.close()


async def subjects(
    stack: AsyncExitStack, sandbox: Sandbox, url: str, command: str, engine: bool
) -> list[dict[str, Call]]:
    """In groups: those of a group are measured in turns. Starting `docker exec` forks this process, which makes
    whatever comes next slower, so it has a group of its own."""
    argv = ("bash", "-c", command)

    async def alone() -> None:
        result = await sandbox.exec(Command(argv, timeout_s=60))
        assert result.exit_code == 0, result

    async def engine_exec() -> None:
        container = f"turnstile-{sandbox.sandbox_id}"
        process = await asyncio.create_subprocess_exec(
            "docker", "exec", container, *argv, stdout=asyncio.subprocess.PIPE
        )
        await process.communicate()
        assert process.returncode == 0

    made: dict[str, Call] = {"exec of the sandbox": alone}
    for name, mode in ERAS.items():
        made[name] = await through_the_door(stack, url, mode, command)
    return [made, {"exec of the engine": engine_exec}] if engine else [made]


async def through_the_door(stack: AsyncExitStack, url: str, mode: str, command: str) -> Call:
    headers = {"authorization": f"Bearer {KEY}"}
    http = await stack.enter_async_context(httpx2.AsyncClient(headers=headers, timeout=60))
    client = await stack.enter_async_context(mcp.Client(streamable_http_client(url, http_client=http), mode=mode))

    async def call() -> None:
        result = await client.call_tool("bash", {"command": command})
        assert not result.is_error, result

    return call


async def take(group: dict[str, Call], calls: int, times: dict[str, list[float]], cpu: dict[str, float]) -> None:
    for subject in group:
        times[subject], cpu[subject] = [], 0.0
    for turn in range(calls + 5):
        for subject, call in group.items():
            started, worked = time.perf_counter(), time.process_time()
            await call()
            if turn >= 5:  # the first few make connections and warm caches
                times[subject].append((time.perf_counter() - started) * 1000)
                cpu[subject] += (time.process_time() - worked) * 1000


async def measured(provider: SandboxProvider, calls: int) -> list[Row]:
    rows: list[Row] = []
    sandbox = await provider.create(SPEC)
    try:
        for name, command in COMMANDS.items():
            async with AsyncExitStack() as stack:
                url = await stack.enter_async_context(door_url(sandbox))
                found = await subjects(stack, sandbox, url, command, provider.name == "docker")
                times: dict[str, list[float]] = {}
                cpu: dict[str, float] = {}
                for group in found:
                    await take(group, calls, times, cpu)
            base = statistics.median(times["exec of the sandbox"])
            for subject, taken in times.items():
                p50, p95 = statistics.median(taken), statistics.quantiles(taken, n=20)[-1]
                numbers = (p50, p95, cpu[subject] / calls, p50 - base, p50 / base)
                rows.append(Row(provider.name, name, subject, calls, *(round(number, 2) for number in numbers)))
    finally:
        await sandbox.destroy()
    return rows


def table(rows: Sequence[Row]) -> str:
    head = "| sandbox | command | through | p50 ms | p95 ms | cpu ms | added ms | ratio |"
    lines = [head, "|---|---|---|--:|--:|--:|--:|--:|"]
    for r in rows:
        names = f"| {r.backend} | {r.command} | {r.subject} "
        lines.append(f"{names}| {r.p50:.2f} | {r.p95:.2f} | {r.cpu:.2f} | {r.added:+.2f} | {r.ratio:.2f} |")
    return "\n".join(lines)


async def run(docker_image: str | None, calls: int) -> list[Row]:
    no_agents = HttpAgentEndpoint(None, idle_connection_s=75, max_connections=256)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="ts-") as folder:
        settings = SandboxSettings(memory_mb=512, cpus=2.0, docker_image=docker_image or "none")
        providers: list[SandboxProvider] = [LocalProvider(settings, Path(folder) / "l")]
        if docker_image is not None:
            providers.append(DockerProvider(settings, Path(folder) / "d", owner=f"benchmark-{os.getpid()}"))
        for provider in providers:
            async with BackgroundTasks() as tasks:
                try:
                    await provider.start(no_agents, tasks)
                    rows += await measured(provider, calls)
                finally:
                    await provider.close()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--docker", metavar="IMAGE", help="measure in a container of this image, too")
    parser.add_argument("--calls", type=int, default=200, help="of each kind")
    parser.add_argument("--out", type=Path, default=HERE / "results", help="folder for tools.json and tools.md")
    options = parser.parse_args()
    rows = anyio.run(run, options.docker, options.calls, backend_options={"use_uvloop": True})
    text = table(rows)
    print(text)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "tools.md").write_text(f"{text}\n")
    (options.out / "tools.json").write_text(json.dumps([asdict(r) for r in rows], indent=1) + "\n")
    worst = max(r.added for r in rows if r.subject in ERAS)
    verdict = "within" if worst < TARGET_MS else "MISSES"
    print(
        f"\nthe MCP endpoint adds at most {worst:.2f} ms at the median: {verdict} the target of {TARGET_MS:g} ms"
    )


if __name__ == "__main__":
    main()
