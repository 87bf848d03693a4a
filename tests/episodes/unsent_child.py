"""A server that kills itself (``kill -9``) between a durable turn and its reply.

``unsent_child.py MODEL FOLDER KIND IMAGE COUNT``: starts COUNT episodes of the light agent in sandboxes of KIND,
and dies when each has had two turns on the average. Writes the id of the turn whose reply was never sent into
``FOLDER/unsent``.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import anyio
from light import TASK
from test_whole_episodes import server

from turnstile_server.journal.protocol import Record, RecordType

TURNS_EACH = 2


async def main(model: Path, folder: Path, kind: str, image: str, count: int) -> None:
    sandboxes = {"kind": kind, "docker_image": image}
    async with server(model, folder, sandboxes=sandboxes, episodes={"max_running": count}) as stage:
        stored, left = stage.journal.append, TURNS_EACH * count

        async def append(record: Record) -> int:
            nonlocal left
            size = await stored(record)
            if record.type is RecordType.TURN:
                left -= 1
                if not left:
                    (folder / "unsent").write_text(record.meta["turn_id"])
                    os.kill(os.getpid(), signal.SIGKILL)
            return size

        stage.journal.append = append  # type: ignore[method-assign]
        for _ in range(count):
            await stage.episode(task=TASK, agent="light", env={"TURNS": "100"})
        await anyio.sleep_forever()


if __name__ == "__main__":
    anyio.run(main, Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], sys.argv[4], int(sys.argv[5]))
