"""Plays on Harbor's docker environment, in a Python that has Harbor: `harbor_program.py MODEL FOLDER SANDBOXES`.

``SANDBOXES``: the section of the settings, as JSON. Prints what it saw as JSON, and kills itself while
an episode runs.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from conversation import END
from gate_support import says, staged
from light import SOLVE, TASK, light_work
from test_whole_episodes import ended

from waiting import wait_until

MODEL, FOLDER = Path(sys.argv[1]), Path(sys.argv[2])
LOOK = "import glob; print([open(path, errors='replace').read() for path in glob.glob('/turnstile/link')])"
EPISODES: dict[str, dict[str, str]] = {"solved": {"WORK": f"{SOLVE}; {LOOK}"}, "idle": {}, "left": {"STAY": "600"}}
"""The environment of each agent."""


async def play() -> None:
    sandboxes = json.loads(sys.argv[3])
    work, wanted = light_work(MODEL, FOLDER / "data", FOLDER / "installs", sandboxes=sandboxes)
    async with staged(MODEL, FOLDER / "data", work=work, **wanted) as stage:
        stage.engine.answers = [says([*stage.encode("hm"), *stage.encode(END)])]
        seen: dict[str, Any] = {"described": (await stage.control.get("/sandboxes")).json()}
        created = {name: await stage.episode(task=TASK, agent="light", env=env) for name, env in EPISODES.items()}

        async def plays() -> bool:
            return bool((await stage.get(created["left"]))["stats"]["turns"])

        for name in ("solved", "idle"):
            seen[name] = await ended(stage, created[name])
        await wait_until(plays)
        sys.stdout.write(json.dumps(seen) + "\n")
        sys.stdout.flush()
        os.kill(os.getpid(), signal.SIGKILL)


asyncio.run(play())
