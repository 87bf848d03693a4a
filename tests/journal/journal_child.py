"""A writer to be killed: appends turns from several tasks and prints each one that was acknowledged.

    journal_child.py DIRECTORY power|process EPISODE_PREFIX APPENDERS

A line ``EPISODE NUMBER`` is written (one write call) only after ``append`` returned. Exit code 2: could not start.
"""

from __future__ import annotations

import asyncio
import os
import random
import sys
from itertools import count
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from journal_support import small, state, turn

from turnstile_server.errors import StartupError
from turnstile_server.journal import FileJournal


async def appender(journal: FileJournal, episode_id: str) -> None:
    chance = random.Random(episode_id)
    await journal.append(state(episode_id, "running"))
    for number in count():
        await journal.append(turn(episode_id, number, items=chance.choice([1, 50, 3000])))
        os.write(1, f"{episode_id} {number}\n".encode())
        if number % 20 == 19:
            doomed = f"{episode_id}-doomed"
            journal.append_soon(turn(doomed, number))
            await journal.append(state(doomed, "completed"))
            await journal.delete(doomed)


async def main(directory: str, durability: str, prefix: str, appenders: str) -> None:
    try:
        journal = await FileJournal.open(Path(directory), small(durability=durability))
    except StartupError as error:
        os.write(2, f"{error.message}\n".encode())
        sys.exit(2)
    os.write(1, b"ready 0\n")
    await asyncio.gather(*(appender(journal, f"{prefix}-{index}") for index in range(int(appenders))))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
