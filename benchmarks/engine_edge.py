"""Measures what an agent feels of the engine's side: the first byte after the engine's first token, and lost work.

    python benchmarks/engine_edge.py [--quick] [--sglang-url URL] [--write-docs] [--out DIR]

*First byte*: the time from the engine's write of its first token to the agent's read of its text, streamed, in all
four dialects, with 1, 8 and 64 calls of about a second (30 tokens) in flight. The engine is a mock in the
benchmark's own process, so both times are of one clock; the server has another core. *Direct* is the same agent on
the mock itself: what two sockets and this client cost.

*Lost work*: calls of 400 tokens run on an engine with a model (embedded; with ``--sglang-url`` also a real SGLang
that serves the same tiny model, ``examples/make_tiny_model.py``) while its weights change. Counted are tokens that
became no turn, and calls whose agent saw an error. The run fails where a call has no first token.

Writes engine_edge.json and engine_edge.md into benchmarks/results/.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import uvloop

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
sys.path.insert(0, str(ROOT / "examples"))

from engine_edge_parts.agents import DIALECTS, DIRECT, Agent, percentile  # noqa: E402
from engine_edge_parts.engine import ROUTING_HEADER, TimedEngine  # noqa: E402
from engine_edge_parts.updates import Lost, lost_work  # noqa: E402
from gate_parts import report  # noqa: E402
from gate_parts.server import KEY  # noqa: E402
from gate_parts.servers import Servers, free_port  # noqa: E402
from local import tiny_model  # noqa: E402

BEGIN = "<!-- benchmarks/engine_edge.py writes from here -->"
END = "<!-- to here, the engine's edge -->"
AIM_MS = 5.0


@dataclasses.dataclass(frozen=True)
class Plan:
    """``rounds``: calls of each agent and dialect; ``updates`` of weights, ``tokens`` of a call meanwhile."""

    concurrent: tuple[int, ...] = (1, 8, 64)
    rounds: int = 8
    agents: int = 4
    updates: int = 6
    tokens: int = 400
    between_s: float = 2.0


QUICK = Plan(concurrent=(1, 4), rounds=2, agents=2, updates=2, tokens=200, between_s=1.0)


class EdgeServers(Servers):
    """The servers of the gate's benchmark, around an engine of this process or around a real one."""

    def __init__(self, folder: Path, model: Path, cores: tuple[int, int], episodes: int, engine_port: int) -> None:
        super().__init__(folder, model, cores, episodes)
        self.engine_port = engine_port

    async def __aenter__(self) -> EdgeServers:
        return self

    async def with_model(self, options: list[str]) -> str:
        """``turnstile serve`` on the core of servers with these options; its control URL."""
        control, agent = free_port(), free_port()
        command = [str(Path(sys.executable).with_name("turnstile")), "serve", *options]
        command += ["--model", str(self._model), "--data-dir", str(self._folder / f"data-{control}")]
        command += ["--control-port", str(control), "--agent-port", str(agent), "--log-level", "warning"]
        process = self._spawn(f"turnstile-{control}", command, self._cores[0], {"TURNSTILE_CONTROL_KEY": KEY})
        await self._ready(process, control, "/ready")
        return f"http://127.0.0.1:{control}"


async def first_bytes(plan: Plan, folder: Path, model: Path, cores: tuple[int, int]) -> list[dict[str, Any]]:
    """One row per server, dialect and number of calls in flight."""
    engine, port = TimedEngine(model), free_port()
    await engine.start(port)
    rows: list[dict[str, Any]] = []
    try:
        most = max(plan.concurrent)
        async with EdgeServers(folder, model, cores, most, port) as servers:
            server = await servers.turnstile("process")
            paths = [(path.removesuffix("/v1/chat/completions"), headers) for path, headers in server.paths]
            gate = [(Agent(server.port, path, headers), path.split("/")[2]) for path, headers in paths]
            names = [f"direct-{n}" for n in range(most)]
            direct = [(Agent(port, "", {ROUTING_HEADER: name}), name) for name in names]
            for concurrent in plan.concurrent:
                rows.append(await _row("direct", "-", direct[:concurrent], engine, plan.rounds))
                for dialect in DIALECTS:
                    rows.append(await _row("gate", dialect, gate[:concurrent], engine, plan.rounds))
            for agent, _ in (*gate, *direct):
                agent.close()
    finally:
        await engine.close()
    return rows


async def _row(
    server: str, dialect: str, agents: list[tuple[Any, str]], engine: TimedEngine, rounds: int
) -> dict[str, Any]:
    lags: list[float] = []
    path, body = DIRECT if server == "direct" else DIALECTS[dialect]
    marker = engine.wire_marker if server == "direct" else engine.marker

    async def play(agent: Agent, episode: str) -> None:
        for _ in range(rounds + 1):
            seen = await agent.call(path, body, marker)
            lags.append(seen - engine.first_token[episode])

    async with asyncio.TaskGroup() as tasks:
        for agent, episode in agents:
            tasks.create_task(play(agent, episode))
    warm = lags[len(agents) :]  # the first call of each opens its connection
    return {
        "server": server,
        "dialect": dialect,
        "concurrent": len(agents),
        "calls": len(warm),
        "p50_ms": 1e3 * percentile(warm, 0.5),
        "p99_ms": 1e3 * percentile(warm, 0.99),
    }


async def losses(
    plan: Plan, folder: Path, models: tuple[Path, Path], cores: tuple[int, int], sglang_url: str | None
) -> list[Lost]:
    engines = {"embedded": ["--engine", "embedded"]}
    if sglang_url is not None:
        engines["SGLang"] = ["--engine", "sglang", "--engine-url", sglang_url]
    found = []
    async with EdgeServers(folder, models[0], cores, 0, 0) as servers:
        for name, options in engines.items():
            control = await servers.with_model(options)
            found.append(
                await lost_work(
                    name,
                    control,
                    KEY,
                    models,
                    agents=plan.agents,
                    updates=plan.updates,
                    tokens=plan.tokens,
                    between_s=plan.between_s,
                )
            )
    return found


def tables(rows: list[dict[str, Any]], lost: list[Lost]) -> str:
    """Markdown: the first bytes, then the lost work."""
    out = ["| calls in flight | through | p50 ms | p99 ms | calls |", "|---:|---|---:|---:|---:|"]
    for row in rows:
        through = "direct" if row["server"] == "direct" else f"gate, {row['dialect']}"
        out.append(
            f"| {row['concurrent']} | {through} | {row['p50_ms']:.2f} | {row['p99_ms']:.2f} | {row['calls']} |"
        )
    out += [
        "",
        "| engine | updates | calls in flight at each | sampled tokens | discarded | calls that failed | turns of "
        "several versions | an update takes |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    out += [
        f"| {one.engine} | {one.updates} | {one.in_flight:.1f} | {one.sampled:,} | {one.discarded} | "
        f"{one.failed_calls} | {one.several_versions} | {1e3 * one.update_s:.0f} ms |"
        for one in lost
    ]
    return "\n".join(out)


async def measured(plan: Plan, sglang_url: str | None) -> tuple[list[dict[str, Any]], list[Lost]]:
    models = tiny_model(1), tiny_model(2)
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[-1]})
    pair = (cores[0], cores[-1])
    with tempfile.TemporaryDirectory(prefix="engine-edge-") as folder:
        rows = await first_bytes(plan, Path(folder), models[0], pair)
        return rows, await losses(plan, Path(folder), models, pair, sglang_url)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few calls: does the benchmark work")
    parser.add_argument("--sglang-url", help="a real SGLang with the tiny model: also measured for lost work")
    parser.add_argument("--out", type=Path, default=HERE / "results", help="folder for engine_edge.json and .md")
    parser.add_argument("--write-docs", action="store_true", help="put the tables into docs/performance.md")
    options = parser.parse_args()
    began, load = time.time(), os.getloadavg()[0]
    rows, lost = uvloop.run(measured(QUICK if options.quick else Plan(), options.sglang_url))
    date = time.strftime("%Y-%m-%d", time.gmtime(began))
    text = f"{report.machine()}; load average before the run {load:.1f}; {date}.\n\n{tables(rows, lost)}"
    print(text)
    options.out.mkdir(parents=True, exist_ok=True)
    facts = {"rows": rows, "lost": [dataclasses.asdict(one) for one in lost], "date": date, "load_before": load}
    (options.out / "engine_edge.json").write_text(json.dumps(facts, indent=1))
    (options.out / "engine_edge.md").write_text(text)
    if options.write_docs:
        report.write_docs(ROOT / "docs" / "performance.md", text, BEGIN, END)


if __name__ == "__main__":
    main()
