"""A process that owns an embedded engine, for tests that kill it: `engine_parent.py MODEL` prints the child's
pid and its socket's folder once it serves, then waits."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from turnstile_server.engines.embedded.engine import EmbeddedEngine
from turnstile_server.settings import EngineSettings


async def main() -> None:
    engine = EmbeddedEngine(Path(sys.argv[1]), EngineSettings())
    await engine.start()
    print(engine.pid, engine.socket.parent, flush=True)  # noqa: T201
    await asyncio.Event().wait()


asyncio.run(main())
