"""kill -9 at random points: every acknowledged turn is there, in order, and the tail is whole."""

from __future__ import annotations

import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path

import anyio
import pytest
from journal_support import drop_index, numbers, pieces, segment_files, small

from turnstile_server.journal import FileJournal, RecordType
from turnstile_server.journal.segments import FoundRecord

pytestmark = pytest.mark.anyio

APPENDERS = 3
LINE = re.compile(rb"(\S+) (\d+)\n")


def live_and_die(directory: Path, life: int, chance: random.Random) -> dict[str, list[int]]:
    """Runs a writer, kills it at a random point, returns what it had acknowledged, by episode, in order."""
    command = [sys.executable, str(Path(__file__).with_name("journal_child.py")), str(directory)]
    durability = chance.choice(["power", "process"])
    with subprocess.Popen(
        [*command, durability, f"life{life}", str(APPENDERS)], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as child:
        assert child.stdout is not None
        assert child.stderr is not None
        output = b""
        enough = chance.choice([0, 1, 10, 100, 400])
        while output.count(b"\n") <= enough:
            chunk = child.stdout.read1()
            assert chunk, child.stderr.read().decode()
            output += chunk
        time.sleep(chance.random() * 0.01)
        child.send_signal(signal.SIGKILL)
        output += child.stdout.read()
        assert child.wait() == -signal.SIGKILL
    acknowledged: dict[str, list[int]] = defaultdict(list)
    for episode_id, number in LINE.findall(output):
        if episode_id != b"ready":
            acknowledged[episode_id.decode()].append(int(number))
    return acknowledged


async def check(directory: Path, acknowledged: dict[str, list[int]], life: int) -> None:
    journal = await FileJournal.open(directory, small())
    for episode_id, expected in acknowledged.items():
        records = await journal.read(episode_id)
        found = numbers([record for record in records if record.type == RecordType.TURN])
        assert found[: len(expected)] == expected == list(range(len(expected)))
        assert found == list(range(len(found))), "beyond the acknowledged ones, order and no gaps"
        assert len(found) <= len(expected) + 2, "one append in flight, and one line that was not written"
        assert records[0].meta["status"] == "running"
    for index in range(
        APPENDERS
    ):  # deleted by the child, but perhaps for the last, which it may not have finished
        doomed = await journal.read(f"life{life}-{index}-doomed")
        assert len(doomed) <= 2
    assert journal.stats.corrupt_records == 0
    await journal.close()
    assert all(isinstance(piece, FoundRecord) for piece in pieces(directory)), "the tail is whole after opening"


async def kill_often(directory: Path, kills: int, seed: int) -> int:
    chance = random.Random(seed)
    everything: dict[str, list[int]] = {}
    for life in range(kills):
        acknowledged = await anyio.to_thread.run_sync(live_and_die, directory, life, chance)
        everything.update(acknowledged)
        await check(directory, acknowledged, life)
        if life % 10 == 9:
            await check(directory, everything, life)
            journal = await FileJournal.open(directory, small())
            for episode_id in list(everything)[: len(everything) // 2]:
                await journal.delete(episode_id)
                del everything[episode_id]
            await journal.close()
        if life % 7 == 6:
            drop_index(directory)
    await check(directory, everything, kills - 1)
    return sum(len(found) for found in everything.values())


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("kills", [21, pytest.param(100, marks=pytest.mark.thorough)])
async def test_kills_lose_nothing_that_was_acknowledged(tmp_path: Path, kills: int) -> None:
    assert await kill_often(tmp_path, kills, seed=2) > 0
    assert segment_files(tmp_path)
    shutil.rmtree(tmp_path)
