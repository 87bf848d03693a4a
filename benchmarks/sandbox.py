"""Measures sandboxes: a command through the helper and through Docker's exec; a sandbox cold, warm and by hand.

    python benchmarks/sandbox.py [--image TAG] [--rounds N] [--starts N] [--write-docs]

Needs a Docker engine and an image with Python (``scripts/ci_docker.sh up``, ``scripts/sandbox_image.sh TAG``);
without them it prints a sentence and exits with 1. All ways take turns in the same container, so that they see the
same machine. Figures are medians; ratios are of medians. "Docker exec" is what a server without the helper would
do: one exec through the same SDK, with its output and exit code read; the command line client is beside it.
"Itself" is the command started and awaited inside the container by a Python that does nothing else.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import platform
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import docker
from docker.errors import DockerException

from gate_parts.report import write_docs
from turnstile_server.errors import TurnstileError
from turnstile_server.http.agent_endpoint import HttpAgentEndpoint
from turnstile_server.sandboxes.background import BackgroundTasks
from turnstile_server.sandboxes.docker.provider import DockerProvider
from turnstile_server.sandboxes.local.provider import LocalProvider
from turnstile_server.sandboxes.pool import SandboxPool
from turnstile_server.sandboxes.protocol import Command, Sandbox, SandboxLimits, SandboxProvider, SandboxSpec
from turnstile_server.settings import SandboxSettings

DOCS = Path(__file__).resolve().parents[1] / "docs" / "performance.md"
START_MARK = "<!-- benchmarks/sandbox.py writes from here -->"
END_MARK = "<!-- to here -->"
SPEC = SandboxSpec(SandboxLimits(memory_bytes=256 << 20, cpus=1.0, pids=64, disk_bytes=64 << 20))
COMMANDS = {
    "true": ("true",),
    "sh -c 'echo hi'": ("sh", "-c", "echo hi"),
    "read 64 KiB": ("head", "-c", "65536", "/dev/zero"),
}
ITSELF = """
import os, sys, time
quiet = [(os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0)]
started = time.perf_counter()
os.waitpid(os.posix_spawnp(sys.argv[1], sys.argv[1:], os.environ, file_actions=quiet), 0)
print(1e3 * (time.perf_counter() - started))
"""

Timed = Callable[[], Awaitable[object]]


@dataclass(frozen=True)
class Row:
    what: str
    milliseconds: list[float]

    @property
    def median(self) -> float:
        return median(self.milliseconds)

    @property
    def worst(self) -> float:
        return max(self.milliseconds)


NO_AGENTS = HttpAgentEndpoint(None, idle_connection_s=75, max_connections=256)


async def timed(work: Timed) -> float:
    started = time.perf_counter()
    await work()
    return 1e3 * (time.perf_counter() - started)


async def take_turns(ways: dict[str, Timed], rounds: int) -> list[Row]:
    """Each way once before it counts, then one after the other in every round."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds + 1):
        for name, work in ways.items():
            took = await timed(work)
            if number:
                times[name].append(took)
    return [Row(name, values) for name, values in times.items()]


class EngineExec:
    """The other way: the engine's exec, by the SDK in a thread and by the command line client."""

    def __init__(self, engine: docker.DockerClient, container: str) -> None:
        self._container = engine.containers.get(container)
        self._name = container

    async def sdk(self, argv: tuple[str, ...]) -> None:
        code, _ = await asyncio.to_thread(self._container.exec_run, list(argv), user="61001:61001")
        assert code == 0

    async def client(self, argv: tuple[str, ...]) -> None:
        process = await asyncio.create_subprocess_exec(
            "docker", "exec", "-u", "61001:61001", self._name, *argv, stdout=asyncio.subprocess.DEVNULL
        )
        assert await process.wait() == 0


async def by_helper(sandbox: Sandbox, argv: tuple[str, ...]) -> None:
    result = await sandbox.exec(Command(argv))
    assert result.exit_code == 0, result


async def alone(sandbox: Sandbox, argv: tuple[str, ...], times: list[float]) -> None:
    result = await sandbox.exec(Command(("python3", "-I", "-S", "-c", ITSELF, *argv)))
    times.append(float(result.stdout))


async def commands(sandbox: Sandbox, engine: docker.DockerClient, rounds: int) -> list[str]:
    by_engine = EngineExec(engine, f"turnstile-{sandbox.sandbox_id}")
    lines = [
        "| in one container | itself ms | helper ms | Docker exec (SDK) ms | `docker exec` ms | SDK / helper |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for name, argv in COMMANDS.items():
        ways: dict[str, Timed] = {
            "helper": lambda argv=argv: by_helper(sandbox, argv),  # type: ignore[misc]
            "sdk": lambda argv=argv: by_engine.sdk(argv),  # type: ignore[misc]
            "client": lambda argv=argv: by_engine.client(argv),  # type: ignore[misc]
        }
        itself: list[float] = []
        ways["itself"] = lambda argv=argv, times=itself: alone(sandbox, argv, times)  # type: ignore[misc]
        helper, sdk, client, _ = await take_turns(ways, rounds)
        lines.append(
            f"| `{name}` | {median(itself):.2f} | {helper.median:.2f} | {sdk.median:.1f} | {client.median:.1f} "
            f"| {sdk.median / helper.median:.0f} |"
        )
    data = os.urandom(64 << 10)
    await sandbox.write("/workspace/file", data)
    write, read = await take_turns(
        {
            "write": lambda: sandbox.write("/workspace/file", data),
            "read": lambda: sandbox.read("/workspace/file", 1 << 20),
        },
        rounds,
    )
    lines.append(f"| write a file of 64 KiB | | {write.median:.2f} | | | |")
    lines.append(f"| read a file of 64 KiB | | {read.median:.2f} | | | |")
    return lines


async def starts(provider: SandboxProvider, label: str, count: int) -> list[Row]:
    """Until the first command has ended; and the removal."""
    made, removed = [], []
    for number in range(count + 1):
        started = time.perf_counter()
        sandbox = await provider.create(SPEC)
        await by_helper(sandbox, ("true",))
        took = 1e3 * (time.perf_counter() - started)
        removal = await timed(sandbox.destroy)
        if number:
            made.append(took)
            removed.append(removal)
    return [Row(f"{label}, first command done", made), Row(f"{label}, removed", removed)]


async def warm_starts(
    provider: SandboxProvider, tasks: BackgroundTasks, settings: SandboxSettings, count: int
) -> list[Row]:
    pool = SandboxPool(provider, settings.model_copy(update={"warm": 2}))
    await pool.start(NO_AGENTS, tasks)
    try:
        handed, first = [], []
        held = await pool.create(SPEC)
        for _ in range(count):
            while pool.warm < 2:  # noqa: ASYNC110 - the pool has no event for it
                await asyncio.sleep(0.05)
            await held.destroy()
            started = time.perf_counter()
            held = await pool.create(SPEC)
            handed.append(1e3 * (time.perf_counter() - started))
            await by_helper(held, ("true",))
            first.append(1e3 * (time.perf_counter() - started))
        return [Row("Docker, warm: handed out", handed), Row("Docker, warm: first command done", first)]
    finally:
        await pool.close()


async def by_hand(image: str, count: int) -> Row:
    async def run() -> None:
        process = await asyncio.create_subprocess_exec(
            "docker", "run", "--rm", "--network", "none", image, "true", stdout=asyncio.subprocess.DEVNULL
        )
        assert await process.wait() == 0

    return Row("`docker run --rm --network none … true`", [await timed(run) for _ in range(count)])


def folder() -> Path:
    return Path(tempfile.mkdtemp(prefix="ts-"))


async def measure(image: str, rounds: int, count: int) -> str:
    async with BackgroundTasks() as tasks:
        return await measure_with(tasks, image, rounds, count)


async def measure_with(tasks: BackgroundTasks, image: str, rounds: int, count: int) -> str:
    settings = SandboxSettings(docker_image=image)
    engine = docker.from_env()
    version = engine.version()["Version"]
    load = os.getloadavg()[0]
    provider = DockerProvider(settings, folder(), f"benchmark-{secrets.token_hex(4)}")
    await provider.start(NO_AGENTS, tasks)
    try:
        lines = await commands(await provider.create(SPEC), engine, rounds)
        rows = await starts(provider, "Docker, cold", count)
    finally:
        await provider.close()
    other = DockerProvider(settings, folder(), f"benchmark-{secrets.token_hex(4)}")
    rows += await warm_starts(other, tasks, settings, count)
    rows.append(await by_hand(image, count))
    local = LocalProvider(settings, folder())
    try:
        await local.start(NO_AGENTS, tasks)
        rows += await starts(local, "bubblewrap, cold", count)
    except TurnstileError as error:
        rows.append(Row(f"bubblewrap: not measured, {error.message}", [float("nan")]))
    finally:
        await local.close()
    lines += ["", "| sandbox | median ms | worst ms |", "|---|---:|---:|"]
    lines += [f"| {row.what} | {row.median:.1f} | {row.worst:.1f} |" for row in rows]
    head = (
        f"{os.cpu_count()} cores, {platform.system()} {platform.release()}, Docker {version}, Python "
        f"{platform.python_version()}; load average before the run {load:.1f}; {time.strftime('%Y-%m-%d')}; "
        f"medians of {rounds} (commands) and {count} (sandboxes)."
    )
    return "\n".join([head, "", *lines])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--image", default=os.environ.get("TURNSTILE_TEST_IMAGE", SandboxSettings().docker_image))
    parser.add_argument("--rounds", type=int, default=40, help="of commands and files")
    parser.add_argument("--starts", type=int, default=12, help="of sandboxes of each kind")
    parser.add_argument("--write-docs", action="store_true", help=f"put the tables into {DOCS.name}")
    arguments = parser.parse_args()
    try:
        report = asyncio.run(measure(arguments.image, arguments.rounds, arguments.starts))
    except (DockerException, TurnstileError, OSError, subprocess.SubprocessError) as error:
        print(f"cannot measure: {error}", file=sys.stderr)
        return 1
    print(report)
    if arguments.write_docs:
        write_docs(DOCS, report, START_MARK, END_MARK)
    return 0


if __name__ == "__main__":
    sys.exit(main())
