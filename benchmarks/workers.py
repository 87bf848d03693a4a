"""Measures what worker processes gain on one machine, and what the process in front of them costs.

    python benchmarks/workers.py [--quick] [--workers N] [--slices N] [--write-docs] [--out DIR]

Servers side by side: one process, N workers, and N workers with one port for agents. They get the same calls
(some 1,200 tokens of history, unstreamed, each going on from the one before) of as many episodes, all at once,
in turns of some seconds. The mock engine and the client are processes of their own on the same cores, so turns
per second show what those leave for the server. The figure that does not depend on them is turns per CPU second
of the busiest process of the server, the one in front included: that process is what limits a server which has a
core for each of its processes. It is the 75th percentile over slices: other work on the machine only takes from
it. Then single calls are timed, and creations, one after another.

Fails if a turn is lost or doubled: each server must have recorded as many as were answered, and each worker of a
server must have episodes. Needs Linux. Writes workers.json and workers.md into benchmarks/results/.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uvloop

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
sys.path.insert(0, str(ROOT / "examples"))

from gate_parts import report  # noqa: E402
from gate_parts.conversation import CHAIN, Body, Conversation  # noqa: E402
from gate_parts.process import cpu_s  # noqa: E402
from gate_parts.server import KEY, fetch, parse_metrics  # noqa: E402
from gate_parts.servers import free_port  # noqa: E402
from gate_parts.wire import Connection  # noqa: E402
from local import tiny_model  # noqa: E402

BEGIN = "<!-- benchmarks/workers.py writes from here -->"
END = "<!-- to here, the workers -->"
START_S = 300.0
STEPS = 4
"""Turns of history, some 1,200 tokens."""
EPISODES = 4
"""Of each worker of the larger servers, on average; the server that is one process has as many in all."""
ALONE = 60
"""Chains of calls with nothing beside them, whose latency is told."""


@dataclass(frozen=True)
class Slice:
    """Some seconds of calls. ``cpu_s``: by process."""

    turns: int
    wall_s: float
    cpu_s: dict[str, float]


@dataclass
class Side:
    """One server. ``pids``: of its workers and, where there is one, the process in front. ``calls``: port and head
    of the model calls of each episode."""

    name: str
    control_url: str
    pids: dict[str, int]
    calls: list[tuple[int, bytes]] = field(default_factory=list)
    slices: list[Slice] = field(default_factory=list)
    creations: list[float] = field(default_factory=list)
    alone: list[float] = field(default_factory=list)
    """Seconds."""

    @property
    def turns(self) -> int:
        return sum(each.turns for each in self.slices)

    def figures(self) -> dict[str, Any]:
        turns = self.turns
        used = {name: sum(each.cpu_s[name] for each in self.slices) for name in self.pids}
        return {
            "server": self.name,
            "turns": turns,
            "turns_per_s": round(_upper([each.turns / each.wall_s for each in self.slices]), 1),
            "turns_per_cpu_s_of_busiest": round(
                _upper([each.turns / max(each.cpu_s.values()) for each in self.slices]), 1
            ),
            "cpu_ms_per_turn": {name: round(1e3 * seconds / turns, 3) for name, seconds in used.items()},
            "call_ms_p50": round(1e3 * statistics.median(self.alone), 2),
            "creation_ms_p50": round(1e3 * statistics.median(self.creations), 2),
        }


def _upper(values: list[float]) -> float:
    """The 75th percentile."""
    return values[0] if len(values) == 1 else statistics.quantiles(values, n=4, method="inclusive")[2]


async def started(
    name: str, folder: Path, model: Path, engine_port: int, workers: int, stack: AsyncExitStack, **variables: str
) -> Side:
    log = folder / f"{name.replace(' ', '-')}.log"
    command = [sys.executable, "-m", "turnstile", "serve", "--engine", "sglang", "--model", str(model)]
    command += ["--engine-url", f"http://127.0.0.1:{engine_port}", "--data-dir", str(folder / name)]
    command += ["--control-port", "0", "--agent-port", "0", "--durability", "process", "--log-level", "warning"]
    command += ["--sandbox", "none", "--workers", str(workers)]
    unlimited = {
        "TURNSTILE_EPISODES__MAX_TURNS": "10000000",
        "TURNSTILE_EPISODES__MAX_SAMPLED_TOKENS": "1000000000",
    }
    popen = spawned(command, log, {**os.environ, "TURNSTILE_CONTROL_KEY": KEY, **unlimited, **variables}, stack)
    assert popen.stdout is not None
    line = await asyncio.wait_for(asyncio.to_thread(popen.stdout.readline), START_S)
    if not line:
        raise SystemExit(f"{name} did not start; its log ends:\n{log.read_text()[-2000:]}")
    ready = json.loads(line)
    pids = {f"worker {each['number']}": each["pid"] for each in ready.get("workers", ())}
    pids["front" if pids else "server"] = ready["pid"]
    return Side(name, ready["control_url"], pids)


def spawned(
    command: list[str], log: Path, environment: dict[str, str], stack: AsyncExitStack
) -> subprocess.Popen[bytes]:
    with log.open("wb") as out:
        popen = subprocess.Popen(command, cwd=HERE, stdout=subprocess.PIPE, stderr=out, env=environment)

    def end() -> None:
        popen.terminate()
        try:
            popen.wait(60)
        except subprocess.TimeoutExpired:
            popen.kill()
            popen.wait()

    stack.callback(end)
    return popen


async def add_episode(side: Side, conversation: Conversation) -> None:
    """A new one whose history is played."""
    began = time.perf_counter()
    task = {"task": {"instruction": "benchmark"}, "agent": "external"}
    made = json.loads(await asyncio.to_thread(fetch, f"{side.control_url}/episodes", task))
    side.creations.append(time.perf_counter() - began)
    host, _, path = made["model_url"].removeprefix("http://").partition("/")
    lines = [f"POST /{path}/v1/chat/completions HTTP/1.1", f"host: {host}", "content-type: application/json"]
    lines += [f"authorization: Bearer {made['episode_key']}", "x-bench-tokens: 0", ""]
    port, head = int(host.rpartition(":")[2]), "\r\n".join(lines).encode()
    side.calls.append((port, head))
    link = await Connection.open(port)
    for turns in range(STEPS):
        answer = await link.request(head, [conversation.step(turns)])
        assert answer.status == 200, answer.body[:500]
    link.close()


async def chain(link: Connection, head: bytes, bodies: tuple[Body, ...], numbers: Iterator[int]) -> list[float]:
    """One chain of calls; the seconds of each."""
    number, took = next(numbers), []
    for body in bodies:
        answer = await link.request(head, body.parts(number))
        assert answer.status == 200, answer.body[:500]
        took.append(answer.total_s)
    return took


async def played(side: Side, bodies: tuple[Body, ...], slice_s: float, numbers: Iterator[int]) -> Slice:
    """All episodes at once."""
    links = [(await Connection.open(port), head) for port, head in side.calls]
    before = {name: cpu_s(pid) for name, pid in side.pids.items()}
    began = time.perf_counter()

    async def keep_calling(link: Connection, head: bytes) -> int:
        count = 0
        while time.perf_counter() - began < slice_s:
            count += len(await chain(link, head, bodies, numbers))
        return count

    turns = sum(await asyncio.gather(*(keep_calling(*each) for each in links)))
    wall_s = time.perf_counter() - began
    used = {name: cpu_s(pid) - before[name] for name, pid in side.pids.items()}
    for link, _ in links:
        link.close()
    return Slice(turns, wall_s, used)


async def timed_alone(side: Side, bodies: tuple[Body, ...], chains: int, numbers: Iterator[int]) -> None:
    port, head = side.calls[0]
    link = await Connection.open(port)
    for _ in range(chains):
        side.alone += (await chain(link, head, bodies, numbers))[1:]  # the first begins a branch
    link.close()


async def recorded(side: Side) -> int:
    text = (await asyncio.to_thread(fetch, f"{side.control_url}/metrics")).decode()
    return round(parse_metrics(text)["turnstile_calls_total"])


def check_spread(side: Side) -> None:
    """Raises SystemExit unless every worker has episodes: else nothing is said of workers."""
    idle = [name for name, used in side.slices[-1].cpu_s.items() if name != "front" and used < 0.001]
    if idle:
        raise SystemExit(f"{side.name}: {', '.join(idle)} had no calls")


async def measured(model: Path, folder: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    workers, slice_s = options.workers, 0.5 if options.quick else 3.0
    conversation, numbers = Conversation(model), itertools.count(step=CHAIN)
    bodies = conversation.chain(STEPS, stream=False)
    async with AsyncExitStack() as stack:
        port = free_port()
        command = [sys.executable, "-m", "gate_parts.engine", str(model), str(port)]
        spawned(command, folder / "engine.log", dict(os.environ), stack)
        one_port = {"TURNSTILE_WORKERS__ONE_AGENT_PORT": "true"}
        sides = [
            await started("one process", folder, model, port, 1, stack),
            await started(f"{workers} workers", folder, model, port, workers, stack),
            await started(f"{workers} workers, one agent port", folder, model, port, workers, stack, **one_port),
        ]
        for side in sides:
            for _ in range(EPISODES * workers):
                await add_episode(side, conversation)
            await played(side, bodies, slice_s / 3, numbers)  # caches, code paths
        began = [await recorded(side) for side in sides]
        alone = Counter[str]()
        for _ in range(options.slices):
            for side in sides:
                side.slices.append(await played(side, bodies, slice_s, numbers))
                check_spread(side)
            for side in sides:
                chains = 1 + ALONE // (options.slices * (10 if options.quick else 1))
                await timed_alone(side, bodies, chains, numbers)
                alone[side.name] += chains * CHAIN
        for side, before in zip(sides, began, strict=True):
            found, sent = await recorded(side) - before, side.turns + alone[side.name]
            if found != sent:
                raise SystemExit(f"{side.name}: {sent} calls were answered, and {found} turns recorded")
        return [side.figures() for side in sides]


def table(rows: list[dict[str, Any]]) -> str:
    one = rows[0]["turns_per_cpu_s_of_busiest"]
    lines = [
        "| server | turns per CPU s of the busiest process | times one process | CPU ms per turn "
        "| turns/s beside client and engine | a call alone, p50 | creation, p50 |",
        "|---|---:|---:|---|---:|---:|---:|",
    ]
    for row in rows:
        figure = row["turns_per_cpu_s_of_busiest"]
        shares = ", ".join(f"{name} {value:.2f}" for name, value in row["cpu_ms_per_turn"].items())
        lines.append(
            f"| {row['server']} | {figure:,.0f} | {figure / one:.2f} | {shares} | {row['turns_per_s']:,.0f} "
            f"| {row['call_ms_p50']:.2f} ms | {row['creation_ms_p50']:.1f} ms |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="short slices: does the benchmark work")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--slices", type=int, default=8, help="of each server")
    parser.add_argument("--write-docs", action="store_true", help="put the table into docs/performance.md")
    parser.add_argument("--out", type=Path, default=HERE / "results", help="folder for the results")
    options = parser.parse_args()
    load_before, began = os.getloadavg()[0], time.time()
    with tempfile.TemporaryDirectory(prefix="turnstile-bench-") as folder:
        rows = uvloop.run(measured(tiny_model(1), Path(folder), options))
    facts: dict[str, Any] = {
        "machine": report.machine(),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "load_before": load_before,
        "seconds": round(time.time() - began),
        "load_after": os.getloadavg()[0],
        "workers": options.workers,
        "slices": options.slices,
        "rows": rows,
        "scaling": rows[1]["turns_per_cpu_s_of_busiest"] / rows[0]["turns_per_cpu_s_of_busiest"],
    }
    text = (
        f"{facts['machine']}; load average before the run {load_before:.1f}, after its "
        f"{facts['seconds'] / 60:.0f} minutes {facts['load_after']:.1f}, itself included; {facts['date']}; "
        f"{options.slices} slices of each server, {EPISODES * options.workers} episodes at once.\n\n{table(rows)}"
    )
    print(text)
    report.write_results(options.out, "workers", facts, text)
    if options.write_docs:
        report.write_docs(ROOT / "docs" / "performance.md", text, BEGIN, END)


if __name__ == "__main__":
    main()
