"""Measures what the gate adds to a model call, against calling the engine directly and against rllm-model-gateway.

    python benchmarks/gate.py [--quick] [--no-peer] [--write-docs] [--lengths N …] [--out DIR]

One run measures, in turns of about a second: the mock engine called directly; a relay that only copies the bytes;
Turnstile with `durability = process` and `power`; `rllm-model-gateway` from PyPI (installed into its own
environment below .cache/) with its two stores. All get the same growing conversation. Calls are measured at
several lengths of it, streamed and not. The server runs on one core, the client and the engine on another. Fails
if Turnstile tokenizes more than the new message of a turn, breaks a path, or loses a token.

Needs Linux; on a single core, server and client disturb each other. Writes gate.json and gate.md
into benchmarks/results/.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path

import uvloop

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
sys.path.insert(0, str(ROOT / "examples"))

from gate_parts import report  # noqa: E402
from gate_parts.conversation import Conversation  # noqa: E402
from gate_parts.measure import Measurement, Plan, Row  # noqa: E402
from gate_parts.servers import PEER, Servers, install_peer  # noqa: E402
from local import tiny_model  # noqa: E402

FULL = Plan(lengths=(1_000, 8_000, 32_000, 128_000), rounds=3, calls=60, slice_s=0.6, episodes=4)
QUICK = Plan(lengths=(1_000, 4_000), rounds=1, calls=10, slice_s=0.3, episodes=2)


async def measured(plan: Plan, peer: Path | None, folder: Path) -> list[Row]:
    model = tiny_model()
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[-1]})
    async with Servers(folder, model, (cores[0], cores[-1]), plan.episodes) as servers:
        subjects = [servers.direct(), await servers.relay()]
        subjects += [await servers.turnstile("process"), await servers.turnstile("power")]
        if peer is not None:
            subjects += [await servers.peer("memory", peer), await servers.peer("sqlite", peer)]
        return await Measurement(Conversation(model), subjects, plan).run()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="short histories, few calls: does the benchmark work")
    parser.add_argument("--no-peer", action="store_true", help=f"leave {PEER} out")
    parser.add_argument("--lengths", type=int, nargs="+", help="tokens of history, ascending")
    parser.add_argument("--out", type=Path, default=HERE / "results", help="folder for gate.json and gate.md")
    parser.add_argument("--write-docs", action="store_true", help="put the tables into docs/performance.md")
    options = parser.parse_args()
    plan = QUICK if options.quick else FULL
    if options.lengths:
        plan = Plan(tuple(options.lengths), plan.rounds, plan.calls, plan.slice_s, plan.episodes)
    venv = ROOT / ".cache" / PEER
    version = None if options.no_peer else install_peer(venv)
    began, load = time.time(), os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="gate-benchmark-") as folder:
        rows = uvloop.run(measured(plan, None if options.no_peer else venv, Path(folder)))
    figures = [row.figures() for row in rows]
    facts = {
        "machine": report.machine(),
        "load_before": load,
        "seconds": time.time() - began,
        "date": time.strftime("%Y-%m-%d", time.gmtime(began)),
        "peer": None if version is None else f"{PEER} {version}",
    }
    heading = f"{facts['machine']}; load average before the run {load:.1f}; {facts['date']}; {facts['peer']}."
    text = f"{heading}\n\n{report.ratios(figures)}\n{report.tables(figures)}"
    print(text)
    report.write_results(options.out, facts, figures, text)
    if options.write_docs:
        report.write_docs(ROOT / "docs" / "performance.md", text)


if __name__ == "__main__":
    main()
