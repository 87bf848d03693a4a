"""A server of local sandboxes and nothing else, to be killed: makes one, leaves things running in it, says so.

``python local_server.py RUN_DIR isolated|unisolated``
"""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path

import anyio
from echo_app import EchoApp, agents_of

from turnstile_server.sandboxes.background import BackgroundTasks
from turnstile_server.sandboxes.local.provider import LocalProvider
from turnstile_server.sandboxes.protocol import Command, SandboxLimits, SandboxSpec
from turnstile_server.settings import SandboxSettings

LIMITS = SandboxLimits(memory_bytes=256 << 20, cpus=1.0, pids=64, disk_bytes=16 << 20)


async def main(run_dir: Path, kind: str) -> None:
    logging.disable()
    if kind == "unisolated":
        os.environ["PATH"] = "/nowhere"
    provider = LocalProvider(SandboxSettings(kind="local", allow_unisolated=True), run_dir)
    async with BackgroundTasks() as tasks:
        await provider.start(agents_of(EchoApp()), tasks)
        assert provider.isolated == (kind == "isolated")
        await fill(provider, run_dir)


async def fill(provider: LocalProvider, run_dir: Path) -> None:
    sandbox = await provider.create(SandboxSpec(LIMITS))
    # Words that a test finds in /proc: a command, and a daemon in a session of its own.
    mark = f"sandbox-of-{run_dir.name}"
    for detach in ("", "setsid "):
        script = f"{detach}sh -c 'sleep 600; : {mark}' </dev/null >/dev/null 2>&1 & sleep 600"
        await sandbox.start(Command(("sh", "-c", script)))
    await sandbox.exec(Command(("true",)))
    sys.stdout.write(f"{sandbox.sandbox_id}\n")
    sys.stdout.flush()
    await anyio.sleep(600)


anyio.run(main, Path(sys.argv[1]), sys.argv[2])
