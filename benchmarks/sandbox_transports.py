"""Measures the two transports of Docker sandboxes side by side: mounted sockets, and the engine's connection.

    python benchmarks/sandbox_transports.py [--image TAG] [--rounds N] [--starts N] [--write-docs]

Needs what ``benchmarks/sandbox.py`` needs. The transports take turns, so that they see the same machine. Figures
are medians. A model call is a POST of 40 KiB over a connection that stays open, from a client inside to an app
that reads it and answers 4 KiB at once: what is measured is the way, not the model.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import platform
import subprocess
import sys
import tempfile
import time
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from statistics import median

from docker.errors import DockerException
from starlette.types import Receive, Scope, Send

from gate_parts.report import write_docs
from sandbox import SPEC, by_helper, folder, timed
from turnstile_server.errors import TurnstileError
from turnstile_server.http.agent_endpoint import HttpAgentEndpoint
from turnstile_server.sandboxes.background import BackgroundTasks
from turnstile_server.sandboxes.docker.provider import DockerProvider
from turnstile_server.sandboxes.protocol import Command, Mount, Sandbox, SandboxSpec
from turnstile_server.settings import SandboxSettings

DOCS = Path(__file__).resolve().parents[1] / "docs" / "performance.md"
START_MARK = "<!-- benchmarks/sandbox_transports.py writes from here -->"
END_MARK = "<!-- to here, the transports -->"
TRANSPORTS = ("bind", "stream")
FILE_BYTES = 1 << 20
AGENT_BYTES = 200 << 20
CALLS = """
import http.client, sys, time, urllib.parse
connection = http.client.HTTPConnection(urllib.parse.urlsplit(sys.argv[1]).netloc)
for number in range(int(sys.argv[2]) + 1):
    started = time.perf_counter()
    connection.request("POST", "/e/one/v1/messages", bytes(40960))
    assert len(connection.getresponse().read()) == 4096
    if number:
        print(1e3 * (time.perf_counter() - started))
"""


async def model(scope: Scope, receive: Receive, send: Send) -> None:
    """Reads a request and answers."""
    while (await receive()).get("more_body"):
        continue
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"4096")]})
    await send({"type": "http.response.body", "body": bytes(4096)})


ENDPOINT = HttpAgentEndpoint(model, idle_connection_s=75, max_connections=256)


async def calls(sandbox: Sandbox, rounds: int) -> list[float]:
    sandbox.admit("one")
    assert sandbox.agent_url is not None
    done = await sandbox.exec(Command(("python3", "-I", "-c", CALLS, sandbox.agent_url, str(rounds))))
    assert done.exit_code == 0, done
    return [float(line) for line in done.stdout.split()]


class Figures:
    """Milliseconds by what was measured and by transport."""

    def __init__(self) -> None:
        self._taken: dict[tuple[str, str], list[float]] = {}

    def add(self, what: str, transport: str, *milliseconds: float) -> None:
        self._taken.setdefault((what, transport), []).extend(milliseconds)

    def lines(self) -> list[str]:
        rows = dict.fromkeys(what for what, _ in self._taken)
        table = ["| median | `bind` ms | `stream` ms |", "|---|---:|---:|"]
        for what in rows:
            shown = [f"{median(self._taken[what, transport]):.2f}" for transport in TRANSPORTS]
            table.append(f"| {what} | {' | '.join(shown)} |")
        return table


async def measure(image: str, rounds: int, starts: int) -> str:
    load, figures = os.getloadavg()[0], Figures()
    async with BackgroundTasks() as tasks, AsyncExitStack() as closing:
        agent = Path(closing.enter_context(tempfile.TemporaryDirectory(prefix="ts-")))
        (agent / "program").write_bytes(os.urandom(AGENT_BYTES))
        with_agent = SandboxSpec(SPEC.limits, mounts=(Mount(agent, "/opt/agent"),))
        providers: dict[str, DockerProvider] = {}
        sandboxes: dict[str, Sandbox] = {}
        for transport in TRANSPORTS:
            settings = SandboxSettings.model_validate({"docker_image": image, "docker_transport": transport})
            run_dir = folder()
            provider = providers[transport] = DockerProvider(settings, run_dir, run_dir.name)
            await provider.start(ENDPOINT, tasks)
            closing.push_async_callback(remove_volumes, run_dir.name)
            closing.push_async_callback(provider.close)
            sandboxes[transport] = await provider.create(SPEC)
        data = os.urandom(FILE_BYTES)
        for number in range(rounds + 1):
            for transport, sandbox in sandboxes.items():
                took = {
                    "exec of `true`": await timed(partial(by_helper, sandbox, ("true",))),
                    "write a file of 1 MiB": await timed(partial(sandbox.write, "/workspace/x", data)),
                    "read a file of 1 MiB": await timed(partial(sandbox.read, "/workspace/x", FILE_BYTES)),
                }
                for what, milliseconds in took.items() if number else ():
                    figures.add(what, transport, milliseconds)
        for transport, sandbox in sandboxes.items():
            figures.add("model call, POST of 40 KiB", transport, *await calls(sandbox, rounds))
        for number in range(starts + 1):
            for transport, provider in providers.items():
                began = time.perf_counter()
                sandbox = await provider.create(SPEC)
                await by_helper(sandbox, ("true",))
                cold = 1e3 * (time.perf_counter() - began)
                removed = await timed(sandbox.destroy)
                if number:
                    figures.add("new sandbox, first command done", transport, cold)
                    figures.add("sandbox removed", transport, removed)
        for transport, provider in providers.items():
            first = await timed(partial(provider.create, with_agent))
            figures.add("first sandbox with an agent of 200 MiB", transport, first)
    head = (
        f"{os.cpu_count()} cores, {platform.system()} {platform.release()}, Python {platform.python_version()}; "
        f"load average before the run {load:.1f}; {time.strftime('%Y-%m-%d')}; {rounds} rounds, "
        f"{starts} sandboxes."
    )
    return "\n".join([head, "", *figures.lines()])


async def remove_volumes(owner: str) -> None:
    names = await asyncio.to_thread(
        subprocess.check_output, ["docker", "volume", "ls", "-q", "--filter", f"label=turnstile.owner={owner}"]
    )
    for name in names.decode().split():
        await asyncio.to_thread(subprocess.check_call, ["docker", "volume", "rm", name], stdout=subprocess.DEVNULL)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--image", default=os.environ.get("TURNSTILE_TEST_IMAGE", SandboxSettings().docker_image))
    parser.add_argument("--rounds", type=int, default=40, help="of commands, files and calls")
    parser.add_argument("--starts", type=int, default=12, help="of sandboxes of each transport")
    parser.add_argument("--write-docs", action="store_true", help=f"put the table into {DOCS.name}")
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
