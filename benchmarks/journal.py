"""Measures what the journal adds to a turn: encoding, append latency, records per second, fdatasync counted apart.

    python benchmarks/journal.py [--dir DIR] [--seconds S] [--context TOKENS]
    python benchmarks/journal.py --open RECORDS [--dir DIR]

Each row is one open journal. ``appenders`` tasks append turns as fast as they are acknowledged. ``fsync`` is the
p50 of one fdatasync, which the disk costs. With one appender ``rest`` is the append's p50 without it, which the
journal costs. ``--open`` writes that many turns, 62 in an episode, and measures instead how long a start takes to
open the journal, with the summaries of its segments and without.
"""

from __future__ import annotations

import argparse
import asyncio
import platform
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from turnstile.models import Message, SamplingUsed, Turn, TurnTimings, WeightSpan
from turnstile_server.journal import FileJournal, turn_of, turn_record
from turnstile_server.journal.file_operations import RealFiles
from turnstile_server.journal.segments import encode, record_header
from turnstile_server.settings import JournalSettings


def example_turn(context: int, completion: int = 150) -> Turn:
    """A turn of an agent that read a file: ``context`` new tokens, about four characters each."""
    return Turn(
        turn_id="turn_0199",
        episode_id="ep_0199",
        parent_id="turn_0198",
        seq=7,
        dialect="chat",
        context_ids=np.arange(context, dtype=np.int32),
        completion_ids=np.arange(completion, dtype=np.int32),
        logprobs=np.full(completion, -0.5, np.float32),
        weight_spans=(WeightSpan(start=0, end=completion, version="w1"),),
        finish_reason="stop",
        sampling=SamplingUsed(max_new_tokens=1024),
        asked_sampling={"temperature": 0.0, "max_tokens": 1024},
        template_hash="0" * 64,
        tools_key="1" * 64,
        request_key="2" * 64,
        new_messages=(Message("tool", "word " * (context * 4 // 5), tool_call_id="call_1"),),
        reply=Message("assistant", "x" * completion * 4),
        timings=TurnTimings(started_at=1.0),
    )


def milliseconds(values: list[float], share: float) -> float:
    return 1e3 * float(np.quantile(np.asarray(values), share))


def encoding(context: int) -> None:
    turn = example_turn(context)
    steps: dict[str, Callable[[], object]] = {
        "turn to record": lambda: turn_record(turn),
        "record to bytes": lambda: encode(turn_record(turn)),
        "with checksum": lambda: record_header(encode(turn_record(turn))),
        "record to turn": lambda: turn_of(turn_record(turn)),
    }
    size = encode(turn_record(turn)).size
    for name, step in steps.items():
        times: list[float] = []
        for _ in range(300):
            started = time.perf_counter()
            step()
            times.append(time.perf_counter() - started)
        p50, p99 = milliseconds(times, 0.5), milliseconds(times, 0.99)
        print(f"encode  context={context:<7} {size:>8} bytes  {name:16} p50 {p50:7.3f} ms  p99 {p99:7.3f} ms")


class TimedFiles(RealFiles):
    """Real files that remember how long each fdatasync took."""

    def __init__(self) -> None:
        self.syncs: list[float] = []

    def sync(self, fd: int) -> None:
        started = time.perf_counter()
        super().sync(fd)
        self.syncs.append(time.perf_counter() - started)


async def appending(directory: Path, durability: str, appenders: int, seconds: float, context: int) -> None:
    settings = JournalSettings.model_validate({"durability": durability})
    files = TimedFiles()
    journal = await FileJournal.open(directory, settings, files)
    turn = example_turn(context)
    latencies: list[float] = []
    began, cpu = time.perf_counter(), time.process_time()

    async def appender() -> None:
        while time.perf_counter() - began < seconds:
            started = time.perf_counter()
            await journal.append(turn_record(turn))
            latencies.append(time.perf_counter() - started)

    await asyncio.gather(*(appender() for _ in range(appenders)))
    wall, cpu = time.perf_counter() - began, time.process_time() - cpu
    stats = journal.stats
    fsync = milliseconds(files.syncs, 0.5) if durability == "power" else 0.0
    p50 = milliseconds(latencies, 0.5)
    print(
        f"append  context={context:<7} {durability:8} appenders={appenders:<3} "
        f"p50 {p50:7.3f} ms  p99 {milliseconds(latencies, 0.99):7.3f} ms  fsync {fsync:6.3f} ms  "
        f"rest {f'{p50 - fsync:6.3f} ms' if appenders == 1 else '-':9}  {len(latencies) / wall:8.0f} records/s  "
        f"{stats.appended_records / max(stats.commits, 1):5.1f} per commit  "
        f"{1e6 * cpu / len(latencies):6.0f} us cpu/record"
    )
    await journal.close()


def files_of(directory: Path, kind: str) -> list[Path]:
    return list(directory.glob(f"*.{kind}"))


async def opening(directory: Path, records: int) -> None:
    """Prints processor seconds of a start."""
    settings = JournalSettings(durability="process", retention_share=None, retention_free_bytes=None)
    journal = await FileJournal.open(directory, settings)
    example = example_turn(100)
    for start in range(0, records, 1000):
        turns = [
            example.model_copy(update={"episode_id": f"ep_{number // 62}", "turn_id": f"turn_{number}"})
            for number in range(start, min(records, start + 1000))
        ]
        await asyncio.gather(*(journal.append(turn_record(turn)) for turn in turns))
    await journal.close()
    size = sum(path.stat().st_size for path in files_of(directory, "tsj"))
    print(f"open  {records} records of {-(-records // 62)} episodes, {size / 1e6:.0f} MB")
    for name, without in (("with summaries", "none"), ("without", "tsi")):
        for summary in files_of(directory, without):
            summary.unlink()
        cpu, wall = time.process_time(), time.perf_counter()
        journal = await FileJournal.open(directory, settings)
        cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
        await journal.close()
        print(f"open  {name:16} {cpu:6.2f} s of processor time  {wall:6.2f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dir", type=Path, default=None, help="where to write (default: a temporary folder)")
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--open", type=int, metavar="RECORDS", help="measure a start on this many turns")
    parser.add_argument("--context", type=int, nargs="*", default=[300, 8_000])
    options = parser.parse_args()
    print(f"{platform.platform()}, Python {platform.python_version()}")
    if options.open:
        directory = Path(tempfile.mkdtemp(prefix="journal-benchmark-", dir=options.dir))
        try:
            asyncio.run(opening(directory, options.open))
        finally:
            shutil.rmtree(directory)
        return
    for context in options.context:
        encoding(context)
    for context in options.context:
        for durability in ("power", "process"):
            for appenders in (1, 64):
                directory = Path(tempfile.mkdtemp(prefix="journal-benchmark-", dir=options.dir))
                try:
                    asyncio.run(appending(directory, durability, appenders, options.seconds, context))
                finally:
                    shutil.rmtree(directory)


if __name__ == "__main__":
    main()
