"""Plays all agents against all faults, live: ``python benchmarks/agents_matrix [--agents A …] [--faults F …]``.

It shows how each agent that ships behaves when a model call fails or its history changes, and what the server
records then. Existing rows are kept (``--again`` plays them anew). A row that fails does not stop the rest. SIGINT
and SIGTERM end the rows in flight and remove their sandboxes. It prints a line per row and writes
docs/agents-matrix.md.

    RECORD=1 or --record   also keeps the traffic in tests/traffic/recordings, for the replay in the test suite
"""

from __future__ import annotations

import argparse
import hashlib
import os
import signal
import subprocess
import sys
import tempfile
import traceback
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import anyio

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "examples")]

from agents_matrix.faults import FAULTS  # noqa: E402
from agents_matrix.recording import SUFFIX, write  # noqa: E402
from agents_matrix.row import Row, play  # noqa: E402
from agents_matrix.server import MatrixServer, matrix_server  # noqa: E402
from agents_matrix.table import markdown  # noqa: E402
from agents_matrix.variants import VARIANTS, write_specs  # noqa: E402
from local import tiny_model  # noqa: E402
from turnstile_server.agents.registry import load_registry  # noqa: E402

ROWS = ROOT / ".cache" / "agents-matrix"
RECORDINGS = ROOT / "tests" / "traffic" / "recordings"
DOCUMENT = ROOT / "docs" / "agents-matrix.md"
LEFT_OUT = frozenset({"shell"})
"""Agents that need further settings to do anything."""

Pair = tuple[str, str]


class NeverCalled(Exception):
    """The agent was not installed here or did not start, which says nothing about the fault."""


@dataclass(frozen=True)
class Options:
    image: str
    at_once: int
    rows: Path
    recordings: Path | None
    """None: no recordings are kept for the test suite."""


async def run(pairs: Sequence[Pair], options: Options) -> int:
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
            playable = [pair for pair in group if pair[0] not in wrong]
            for agent, _ in set(group) - set(playable):
                print(f"{agent:16} {fault:14} FAILED: {wrong[agent]}", flush=True)
            failed += len(group) - len(playable)
            async with matrix_server(model, Path(folder) / f"data-{fault}", specs, options.image) as server:
                failed += await _group(server, playable, options)
    return failed


async def _group(server: MatrixServer, pairs: Iterable[Pair], options: Options) -> int:
    failures: list[Pair] = []
    slots = anyio.Semaphore(options.at_once)

    async def one(pair: Pair) -> None:
        try:
            async with slots:
                await _row(server, pair, options)
        except NeverCalled:
            failures.append(pair)
        except Exception:  # noqa: BLE001 - whatever it is, the other rows go on
            print(f"{pair[0]:16} {pair[1]:14} FAILED\n{traceback.format_exc()}", flush=True)
            failures.append(pair)

    async with anyio.create_task_group() as tasks:
        for pair in pairs:
            tasks.start_soon(one, pair)
    return len(failures)


async def _row(server: MatrixServer, pair: Pair, options: Options) -> None:
    row, recording = await play(server, *pair)
    if row.calls == 0:
        print(f"{row.agent:16} {row.fault:14} FAILED before its first call: {row.error}", flush=True)
        raise NeverCalled(row.error)
    path = _path(options.rows, pair)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(row.model_dump_json(indent=1))
    write(recording, path.with_suffix(SUFFIX))
    if options.recordings is not None and row.fired:
        write(recording, options.recordings / row.agent / f"{row.fault}{SUFFIX}")
    stats = row.stats
    print(
        f"{row.agent:16} {row.fault:14} {row.status}/{row.exit_code} calls={row.calls} turns={stats['turns']} "
        f"fired={row.fired} done={row.finished} trained={stats['trained_tokens']}/{stats['sampled_tokens']} "
        f"kinds={row.kinds} breaks={stats['breaks']} cosmetic={stats['cosmetic']} refused={row.refused} "
        f"{row.wall_s:.1f}s {row.memory_mb}MB",
        flush=True,
    )


def _path(rows: Path, pair: Pair) -> Path:
    return rows / f"{pair[0]}.{pair[1]}.json"


def _played(rows: Path, pair: Pair, version: str) -> bool:
    """Whether the row is there, with this version of the agent."""
    path = _path(rows, pair)
    return path.exists() and Row.model_validate_json(path.read_text()).version == version


def agents_image() -> str:
    """An image with what the specs of all agents need, made once."""
    packages = sorted({package for spec in load_registry() for package in spec.needs})
    tag = f"turnstile-test:agents-{hashlib.sha256(' '.join(packages).encode()).hexdigest()[:8]}"
    subprocess.run([ROOT / "scripts" / "sandbox_image.sh", tag, *packages], check=True)
    return tag


def main() -> int:
    versions = {spec.name: spec.version for spec in load_registry()}
    known = [name for name in versions if name not in LEFT_OUT]
    parser = argparse.ArgumentParser(description="All agents against all faults, live.")
    parser.add_argument("--agents", nargs="+", default=known, choices=known)
    parser.add_argument("--faults", nargs="+", default=list(FAULTS), choices=list(FAULTS))
    parser.add_argument("--again", action="store_true", help="also rows that are there already")
    parser.add_argument("--at-once", type=int, default=2)
    parser.add_argument("--record", action="store_true", default=bool(os.environ.get("RECORD")))
    parser.add_argument("--image", help="Docker image; without it one is made with what the agents need")
    parser.add_argument("--rows", type=Path, default=ROWS, help="folder of the rows that are there already")
    parser.add_argument("--table", type=Path, default=DOCUMENT, help="where the table is written")
    asked = parser.parse_args()
    pairs = [(agent, fault) for agent in asked.agents for fault in asked.faults]
    wanted = [pair for pair in pairs if asked.again or not _played(asked.rows, pair, versions[pair[0]])]
    options = Options(
        asked.image or agents_image(), asked.at_once, asked.rows, RECORDINGS if asked.record else None
    )
    failed = 0
    # asyncio turns an interrupt into a cancellation, if it is not ignored (as a shell has it for its children).
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    try:
        failed = anyio.run(run, wanted, options)
    except KeyboardInterrupt:
        failed = len(wanted)
    rows = [Row.model_validate_json(path.read_text()) for path in sorted(asked.rows.glob("*.json"))]
    order = list(FAULTS)
    rows.sort(key=lambda row: (row.agent, order.index(row.fault)))
    asked.table.write_text(markdown(rows))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
