"""Measures what the gate adds to a model call, against calling the engine directly and against other gateways.

    python benchmarks/gate.py [--quick] [--no-peers] [--no-memory] [--lengths N …] [--rounds N]
                              [--write-docs] [--out DIR]
    python benchmarks/gate.py --count-calls [--quick] [--lengths N …]
    TURNSTILE_SGLANG_PYTHON=… python benchmarks/gate.py --sglang [--quick] [--write-docs]

One run measures, in turns of a fraction of a second: the mock engine called directly; a relay that only copies the
bytes; Turnstile with `durability = process` and `power`; `rllm-model-gateway` with its two stores and the gateway
of `agentcore-rl-toolkit` in its two modes, each from PyPI in an environment of its own below .cache/. All get the
same growing conversation. Calls are measured at several lengths of it, streamed and not. The server runs on one
core, the client and the engine on another. Then servers of their own show what episodes cost in memory.

``--count-calls`` counts calls of functions per turn instead, which depend little on how busy the machine is.
``--sglang`` plays conversations on a real SGLang instead: through its own `/v1/chat/completions`, and through
Turnstile in front of the same server (``gate_parts/reference.py``).

Fails if Turnstile tokenizes more than the new message of a turn, breaks a path, or loses a token.

Needs Linux; on a single core, server and client disturb each other. Writes gate.json and gate.md (gate_calls,
gate_sglang) into benchmarks/results/.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import uvloop

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
sys.path[:0] = [str(ROOT / "examples"), str(ROOT / "tests")]

from gate_parts import report, tables  # noqa: E402
from gate_parts.aims import OPEN_EPISODES, OPEN_TOKENS, TRACE_TOKENS, aims  # noqa: E402
from gate_parts.calls import CallCounting, CallCounts  # noqa: E402
from gate_parts.conversation import Conversation  # noqa: E402
from gate_parts.measure import Measurement, Plan  # noqa: E402
from gate_parts.memory import MemoryCost, MemoryMeasurement, MemoryPlan  # noqa: E402
from gate_parts.peers import AGENTCORE, RLLM, Agentcore, Peer, Rllm, install  # noqa: E402
from gate_parts.reference import ReferencePlan, engine_processes, played, reference_table  # noqa: E402
from gate_parts.row import Figures, Row  # noqa: E402
from gate_parts.server import fetch  # noqa: E402
from gate_parts.servers import Servers  # noqa: E402
from local import tiny_model  # noqa: E402
from sglang_server import sglang_process  # noqa: E402 - the tests' way to start a real server

FULL = Plan(lengths=(1_000, 8_000, 32_000, 128_000), rounds=12, chains=20, warm_chains=8, slice_s=0.3, episodes=4)
QUICK = Plan(lengths=(1_000, 4_000), rounds=2, chains=2, warm_chains=1, slice_s=0.2, episodes=2)
FULL_MEMORY = MemoryPlan(TRACE_TOKENS, 5, OPEN_TOKENS, OPEN_EPISODES, rest_s=60.0)
QUICK_MEMORY = MemoryPlan(4_000, 2, 2_000, 8, rest_s=0.5)
REFERENCE = ReferencePlan(firsts=(1_000, 8_000), rounds=6, turns=10, sampled=16)
QUICK_REFERENCE = ReferencePlan(firsts=(500,), rounds=2, turns=3, sampled=8)
SGLANG_FLAGS = ("--context-length", "20480")
SGLANG_BEGIN = "<!-- benchmarks/gate.py --sglang writes from here -->"
SGLANG_END = "<!-- to here, sglang -->"
COUNTED_CHAINS, COUNTED_CHAINS_QUICK = 20, 3


def cores() -> tuple[int, int]:
    """The servers' core and ours, on which this process is put."""
    allowed = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {allowed[-1]})
    return allowed[0], allowed[-1]


async def measured(
    plan: Plan, memory: MemoryPlan | None, peers: Sequence[Peer], folder: Path
) -> tuple[list[Row], MemoryCost | None]:
    model = tiny_model()
    pair = cores()
    async with Servers(folder, model, pair, plan.episodes) as servers:
        subjects = [servers.direct(), await servers.relay()]
        subjects += [await servers.turnstile("process"), await servers.turnstile("power")]
        subjects += [await servers.peer(peer) for peer in peers]
        rows = await Measurement(Conversation(model), servers, subjects, plan).run()
    if memory is None:
        return rows, None
    async with Servers(folder, model, pair, 0) as servers:
        return rows, await MemoryMeasurement(model, servers, memory).run()


async def counted(lengths: Sequence[int], chains: int, folder: Path) -> list[CallCounts]:
    model = tiny_model()
    async with Servers(folder, model, cores(), 1) as servers:
        return await CallCounting(model, servers, folder, lengths, chains).run()


async def referenced(plan: ReferencePlan, folder: Path, url: str, pid: int) -> tuple[list[Figures], int]:
    model = tiny_model()
    async with Servers(folder, model, cores(), 0, engine_url=url) as servers:
        return await played(servers, model, engine_processes(pid), int(url.rpartition(":")[2]), plan)


def peers_of(options: argparse.Namespace) -> tuple[list[Peer], dict[str, str]]:
    """The peers, and the versions of their packages by name."""
    if options.no_peers:
        return [], {}
    venvs = {package: ROOT / ".cache" / package for package in (RLLM, AGENTCORE)}
    versions = {package: install(package, venv) for package, venv in venvs.items()}
    rllm = [Rllm(store, venvs[RLLM]) for store in ("memory", "sqlite")]
    return [*rllm, *(Agentcore(mode, venvs[AGENTCORE]) for mode in ("tree", "linear"))], versions


def facts_before(options: argparse.Namespace) -> dict[str, Any]:
    """The machine and the programs, and how busy it is before a run."""
    head = subprocess.run(
        ["git", "-C", str(ROOT), "describe", "--always", "--dirty"], capture_output=True, text=True, check=False
    )
    return {
        "machine": report.machine(),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "began": time.time(),
        "load_before": os.getloadavg()[0],
        "revision": head.stdout.strip() or None,
        "versions": {name: version(name) for name in ("uvloop", "uvicorn", "aiohttp", "tokenizers")},
        "options": {name: value for name, value in vars(options).items() if not isinstance(value, Path)},
    }


def heading(facts: dict[str, Any]) -> str:
    """The facts in one paragraph, with what the machine did meanwhile."""
    facts["load_after"] = os.getloadavg()[0]
    facts["seconds"] = time.time() - facts.pop("began")
    programs = ", ".join(f"{name} {number}" for name, number in facts["versions"].items())
    return (
        f"{facts['machine']}; load average before the run {facts['load_before']:.1f}, after its "
        f"{facts['seconds'] / 60:.0f} minutes {facts['load_after']:.1f}, itself included; {facts['date']}, "
        f"revision {facts['revision']}; {programs}."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="short histories, few calls: does the benchmark work")
    parser.add_argument("--no-peers", action="store_true", help=f"leave {RLLM} and {AGENTCORE} out")
    parser.add_argument("--no-memory", action="store_true", help="leave the memory of episodes out")
    parser.add_argument("--lengths", type=int, nargs="+", help="tokens of history, ascending")
    parser.add_argument("--rounds", type=int, help="slices of each kind")
    parser.add_argument("--out", type=Path, default=HERE / "results", help="folder for the results")
    parser.add_argument("--write-docs", action="store_true", help="put the tables into docs/performance.md")
    modes = parser.add_mutually_exclusive_group()
    modes.add_argument("--count-calls", action="store_true", help="count calls of functions per turn instead")
    modes.add_argument("--sglang", action="store_true", help="compare with a real SGLang's own server instead")
    options = parser.parse_args()
    plan = QUICK if options.quick else FULL
    lengths, rounds = tuple(options.lengths or plan.lengths), options.rounds or plan.rounds
    plan = dataclasses.replace(plan, lengths=lengths, rounds=rounds)
    with tempfile.TemporaryDirectory(prefix="gate-") as folder:
        if options.sglang:
            compare_with_sglang(options, QUICK_REFERENCE if options.quick else REFERENCE, Path(folder))
        elif options.count_calls:
            count_calls(options, plan, Path(folder))
        else:
            measure(options, plan, Path(folder))


def measure(options: argparse.Namespace, plan: Plan, folder: Path) -> None:
    """The whole comparison, written out."""
    peers, versions = peers_of(options)
    facts = facts_before(options)
    facts["versions"] |= versions
    memory = None if options.no_memory else QUICK_MEMORY if options.quick else FULL_MEMORY
    rows, cost = uvloop.run(measured(plan, memory, peers, folder))
    figures = [row.figures() for row in rows]
    parts = [heading(facts), tables.aims_table(aims(figures, cost)), tables.ratios(figures)]
    parts += [tables.memory_table(cost)] if cost is not None else []
    text = "\n\n".join(part.strip() for part in (*parts, tables.tables(figures))) + "\n"
    print(text)
    facts |= {"rows": figures, "memory": None if cost is None else cost.figures()}
    report.write_results(options.out, "gate", facts, text)
    if options.write_docs:
        report.write_docs(ROOT / "docs" / "performance.md", text)


def count_calls(options: argparse.Namespace, plan: Plan, folder: Path) -> None:
    """Calls of functions per turn, written out."""
    facts = facts_before(options)
    chains = COUNTED_CHAINS_QUICK if options.quick else COUNTED_CHAINS
    counts = uvloop.run(counted(plan.lengths, chains, folder))
    text = f"{heading(facts)}\n\n{tables.calls_table(counts)}"
    print(text)
    facts["calls"] = [one.figures() for one in counts]
    report.write_results(options.out, "gate_calls", facts, text)
    if options.write_docs:
        report.write_docs(ROOT / "docs" / "performance.md", text, tables.CALLS_BEGIN, tables.CALLS_END)


def compare_with_sglang(options: argparse.Namespace, plan: ReferencePlan, folder: Path) -> None:
    """SGLang's own server and Turnstile in front of it, written out."""
    facts = facts_before(options)
    facts["plan"] = dataclasses.asdict(plan)
    with sglang_process(tiny_model(), SGLANG_FLAGS) as engine:
        facts["sglang"] = json.loads(fetch(f"{engine.url}/server_info")).get("version")
        rows, breaks = uvloop.run(referenced(plan, folder, engine.url, engine.pid))
    facts["breaks"] = breaks
    calls = sum(row["calls"] for row in rows) // 2
    engine_words = (
        f"SGLang {facts['sglang']}; {breaks} of {calls} counted calls through Turnstile broke their path."
    )
    text = f"{heading(facts)} {engine_words}\n\n{reference_table(rows)}"
    print(text)
    report.write_results(options.out, "gate_sglang", facts | {"rows": rows}, text)
    if options.write_docs:
        report.write_docs(ROOT / "docs" / "performance.md", text, SGLANG_BEGIN, SGLANG_END)


if __name__ == "__main__":
    main()
