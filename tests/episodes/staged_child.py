"""A server with a scripted engine in a process of its own, to be killed: ``staged_child.py MODEL DATA_DIR SEED``.

Prints one line of JSON when it serves. Its engine says a few words, chunk by chunk, and takes its time.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import anyio
from gate_support import Prompted, Said, staged

WORDS = ("return", "self", "default", "value", "import", "collections", "for", "name", "in", "range", "None")


async def main(model: Path, data_dir: Path, seed: int) -> None:
    pick = random.Random(seed)
    async with staged(model, data_dir) as stage:

        async def answer(_: Prompted) -> AsyncIterator[Said | Exception]:
            for _ in range(pick.randrange(1, 6)):
                yield Said(stage.encode(f" {pick.choice(WORDS)}"))
                await anyio.sleep(pick.random() * 0.004)
            yield Said(stage.encode("<|im_end|>"), "stop")

        stage.engine.answers = [answer]
        sys.stdout.write(json.dumps({"control": str(stage.control.base_url)}) + "\n")
        sys.stdout.flush()
        await anyio.sleep_forever()


if __name__ == "__main__":
    anyio.run(main, Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
