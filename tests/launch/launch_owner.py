"""A process that owns a toy engine, for tests that kill it: ``launch_owner.py FOLDER`` says that it
begins, and starts and stops the engine again and again."""

from __future__ import annotations

import sys
from pathlib import Path

import anyio
from launch_support import Toy, engine_settings

from turnstile_server.engines.launch.supervisor import EngineProcess


async def main() -> None:
    toy = Toy(Path(sys.argv[1]))
    print("begins", flush=True)  # noqa: T201
    while True:
        process = EngineProcess(engine_settings(), toy.launch(stop_grace_s=0.2), toy.folder)
        await process.start()
        await process.stop()


anyio.run(main, backend_options={"use_uvloop": True})
