"""Measures what worker processes gain on one machine, and what the process in front of them costs.

    python benchmarks/workers.py [--workers N] [--slices N] [--out DIR]

Servers side by side: one process, N workers, and N workers with one port for agents. They get the same calls (1k
tokens of history, unstreamed) of as many episodes, in turns of some seconds. The mock engine and the client are
processes of their own on the same cores, so turns per second of wall time show what is left for the server. The
figure that does not depend on them is turns per CPU second of the busiest process of the server: that process is
what limits a server which has a core for each of its processes. Creations are timed one after another.

Fails if a turn is lost: each server must have recorded as many as were answered. Writes workers.json into
benchmarks/results/.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uvloop

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "examples"))

from gate_parts.conversation import Conversation  # noqa: E402
from gate_parts.servers import KEY, Process, fetch, free_port  # noqa: E402
from gate_parts.wire import Connection  # noqa: E402
from local import tiny_model  # noqa: E402

START_S = 120.0
STEPS = 4
"""Turns of history, some 1,200 tokens."""


@dataclass
class Side:
    """One server. ``processes``: of its workers and, where there is one, the process in front. ``calls``: where
    the model calls of each episode go."""

    name: str
    popen: subprocess.Popen[bytes]
    control_url: str
    processes: dict[str, Process]
    calls: list[tuple[int, bytes]] = field(default_factory=list)
    turns: int = 0
    wall_s: float = 0.0
    cpu_s: dict[str, float] = field(default_factory=dict)
    creations: list[float] = field(default_factory=list)

    def figures(self) -> dict[str, Any]:
        busiest = max(self.cpu_s.values())
        return {
            "server": self.name,
            "turns": self.turns,
            "turns_per_s": round(self.turns / self.wall_s, 1),
            "turns_per_cpu_s_of_busiest": round(self.turns / busiest, 1),
            "cpu_ms_per_turn": {name: round(1e3 * used / self.turns, 3) for name, used in self.cpu_s.items()},
            "creation_ms_p50": round(1e3 * statistics.median(self.creations), 2),
        }


async def started(
    name: str, folder: Path, model: Path, engine_port: int, workers: int, stack: AsyncExitStack, **variables: str
) -> Side:
    log = folder / f"{name}.log"
    command = [sys.executable, "-m", "turnstile", "serve", "--engine", "sglang", "--model", str(model)]
    command += ["--engine-url", f"http://127.0.0.1:{engine_port}", "--data-dir", str(folder / name)]
    command += ["--control-port", "0", "--agent-port", "0", "--durability", "process", "--log-level", "warning"]
    command += ["--sandbox", "none", "--workers", str(workers)]
    environment = {**os.environ, "TURNSTILE_CONTROL_KEY": KEY, "TURNSTILE_EPISODES__MAX_TURNS": "10000000"}
    popen = spawned(command, log, {**environment, **variables})
    stack.callback(popen.wait, 60)
    stack.callback(popen.terminate)
    assert popen.stdout is not None
    ready = json.loads(await asyncio.wait_for(asyncio.to_thread(popen.stdout.readline), START_S))
    pids = {f"worker {each['number']}": each["pid"] for each in ready.get("workers", ())}
    pids["front" if pids else "server"] = ready["pid"]
    processes = {label: Process(label, _Pid(pid), log) for label, pid in pids.items()}  # type: ignore[arg-type]
    return Side(name, popen, ready["control_url"], processes)


def spawned(command: list[str], log: Path, environment: dict[str, str]) -> subprocess.Popen[bytes]:
    with log.open("wb") as out:
        return subprocess.Popen(command, cwd=HERE, stdout=subprocess.PIPE, stderr=out, env=environment)


class _Pid:
    """What ``Process`` asks of a child, of a process that is none of ours."""

    def __init__(self, pid: int) -> None:
        self.pid = pid


async def add_episode(side: Side, conversation: Conversation) -> None:
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


async def played(side: Side, conversation: Conversation, slice_s: float, numbers: Any) -> None:
    body = conversation.body(STEPS, stream=False)
    before = {name: process.cpu_s() for name, process in side.processes.items()}
    began = time.perf_counter()

    async def keep_calling(port: int, head: bytes) -> int:
        link, count = await Connection.open(port), 0
        while time.perf_counter() - began < slice_s:
            answer = await link.request(head, body.parts(next(numbers)))
            assert answer.status == 200, answer.body[:500]
            count += 1
        link.close()
        return count

    side.turns += sum(await asyncio.gather(*(keep_calling(*call) for call in side.calls)))
    side.wall_s += time.perf_counter() - began
    for name, process in side.processes.items():
        side.cpu_s[name] = side.cpu_s.get(name, 0.0) + process.cpu_s() - before[name]


async def recorded(side: Side) -> int:
    text = (await asyncio.to_thread(fetch, f"{side.control_url}/metrics")).decode()
    [line] = [line for line in text.splitlines() if line.startswith("turnstile_turns_total ")]
    return round(float(line.rpartition(" ")[2]))


async def measured(model: Path, folder: Path, workers: int, slices: int) -> list[dict[str, Any]]:
    conversation, numbers = Conversation(model), iter(range(10**9))
    async with AsyncExitStack() as stack:
        port = free_port()
        command = [sys.executable, "-m", "gate_parts.engine", str(model), str(port)]
        engine = spawned(command, folder / "engine.log", dict(os.environ))
        stack.callback(engine.wait, 10)
        stack.callback(engine.terminate)
        await asyncio.sleep(3)
        one_port = {"TURNSTILE_PROCESSES__ONE_AGENT_PORT": "true"}
        sides = [
            await started("one process", folder, model, port, 1, stack),
            await started(f"{workers} workers", folder, model, port, workers, stack),
            await started(f"{workers} workers, one agent port", folder, model, port, workers, stack, **one_port),
        ]
        for side in sides:
            for _ in range(4 * workers):
                await add_episode(side, conversation)
            await played(side, conversation, 1.0, numbers)  # caches, code paths
            side.turns, side.wall_s, side.cpu_s = 0, 0.0, {}
        began = [await recorded(side) for side in sides]
        for _ in range(slices):
            for side in sides:
                await played(side, conversation, 3.0, numbers)
        for side, before in zip(sides, began, strict=True):
            assert await recorded(side) - before == side.turns, f"{side.name} lost or doubled a turn"
        return [side.figures() for side in sides]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--slices", type=int, default=4)
    parser.add_argument("--out", type=Path, default=HERE / "results")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="turnstile-bench-") as folder:
        found = uvloop.run(measured(tiny_model(1), Path(folder), options.workers, options.slices))
    one, many, *_ = found
    scaling = many["turns_per_cpu_s_of_busiest"] / one["turns_per_cpu_s_of_busiest"]
    for row in found:
        print(json.dumps(row))
    print(f"{options.workers} workers: {scaling:.2f} times the turns per CPU second of the busiest process")
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "workers.json").write_text(json.dumps({"rows": found, "scaling": scaling}, indent=1) + "\n")


if __name__ == "__main__":
    main()
