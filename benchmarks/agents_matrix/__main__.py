"""All agents against all faults, live: ``python benchmarks/agents_matrix [--agents A …] [--faults F …]``.

Rows that are there already are left alone (``--again`` plays them anew); one that fails does not stop the rest;
SIGINT and SIGTERM end the rows in flight and remove their sandboxes. Prints a line per row and writes the table.

    RECORD=1 or --record   also keeps the traffic in tests/traffic/recordings, for the replay in the test suite
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import traceback
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path

import anyio

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "examples")]

from agents_matrix.faults import FAULTS  # noqa: E402
from agents_matrix.recording import SUFFIX, write  # noqa: E402
from agents_matrix.rig import Rig, rigged  # noqa: E402
from agents_matrix.row import Row, play  # noqa: E402
from agents_matrix.table import markdown  # noqa: E402
from agents_matrix.variants import VARIANTS, write_specs  # noqa: E402
from local import tiny_model  # noqa: E402
from turnstile_server.agents.registry import load_registry  # noqa: E402

ROWS = ROOT / ".cache" / "agents-matrix"
RECORDINGS = ROOT / "tests" / "traffic" / "recordings"
DOCUMENT = ROOT / "docs" / "agents-matrix.md"
MEMORY_MB = 3072
LEFT_OUT = frozenset({"shell"})
"""Agents that are none without further words."""

Pair = tuple[str, str]


async def run(pairs: Sequence[Pair], *, at_once: int, record: bool) -> int:
    """Plays the rows; how many could not be played."""
    model = tiny_model(1)
    failed = 0
    groups: defaultdict[str, list[Pair]] = defaultdict(list)
    for pair in pairs:
        groups[pair[1] if pair[1] in VARIANTS else ""].append(pair)
    with tempfile.TemporaryDirectory(prefix="matrix") as folder:
        for fault, group in groups.items():
            specs = Path(folder) / f"specs-{fault}"
            wrong = write_specs(fault, specs)
            for agent, why in wrong.items():
                print(f"{agent:16} {fault:14} FAILED: {why}", flush=True)
            playable = [pair for pair in group if pair[0] not in wrong]
            failed += len(group) - len(playable)
            async with rigged(model, Path(folder) / f"data-{fault}", specs, MEMORY_MB) as rig:
                failed += await _group(rig, playable, at_once, record)
    return failed


async def _group(rig: Rig, pairs: Iterable[Pair], at_once: int, record: bool) -> int:
    failures: list[Pair] = []
    slots = anyio.Semaphore(at_once)

    async def one(pair: Pair) -> None:
        try:
            async with slots:
                await _row(rig, pair, record)
        except Exception:  # noqa: BLE001 - whatever it is, the other rows go on
            print(f"{pair[0]:16} {pair[1]:14} FAILED\n{traceback.format_exc()}", flush=True)
            failures.append(pair)

    async with anyio.create_task_group() as tasks:
        for pair in pairs:
            tasks.start_soon(one, pair)
    return len(failures)


async def _row(rig: Rig, pair: Pair, record: bool) -> None:
    row, recording = await play(rig, *pair)
    path = _path(pair)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(row.model_dump_json(indent=1))
    write(recording, path.with_suffix(SUFFIX))
    if record and row.fired:
        write(recording, RECORDINGS / row.agent / f"{row.fault}{SUFFIX}")
    stats = row.stats
    print(
        f"{row.agent:16} {row.fault:14} {row.status}/{row.exit_code} calls={row.calls} turns={stats['turns']} "
        f"fired={row.fired} done={row.finished} trained={stats['trained_tokens']}/{stats['sampled_tokens']} "
        f"kinds={row.kinds} breaks={stats['breaks']} cosmetic={stats['cosmetic']} refused={row.refused} "
        f"{row.wall_s:.1f}s {row.memory_mb}MB",
        flush=True,
    )


def _path(pair: Pair) -> Path:
    return ROWS / f"{pair[0]}.{pair[1]}.json"


def main() -> int:
    known = [spec.name for spec in load_registry() if spec.name not in LEFT_OUT]
    parser = argparse.ArgumentParser(description="All agents against all faults, live.")
    parser.add_argument("--agents", nargs="+", default=known, choices=known)
    parser.add_argument("--faults", nargs="+", default=list(FAULTS), choices=list(FAULTS))
    parser.add_argument("--again", action="store_true", help="also rows that are there already")
    parser.add_argument("--at-once", type=int, default=2)
    parser.add_argument("--record", action="store_true", default=bool(os.environ.get("RECORD")))
    parser.add_argument("--no-table", action="store_true", help="leave docs/agents-matrix.md alone")
    options = parser.parse_args()
    pairs = [(agent, fault) for agent in options.agents for fault in options.faults]
    wanted = [pair for pair in pairs if options.again or not _path(pair).exists()]
    failed = 0
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        failed = anyio.run(lambda: run(wanted, at_once=options.at_once, record=options.record))
    except KeyboardInterrupt:
        failed = len(wanted)
    rows = [Row.model_validate_json(path.read_text()) for path in sorted(ROWS.glob("*.json"))]
    order = list(FAULTS)
    rows.sort(key=lambda row: (row.agent, order.index(row.fault)))
    if not options.no_table:
        DOCUMENT.write_text(markdown(rows))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
