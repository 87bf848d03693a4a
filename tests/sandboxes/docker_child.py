"""Makes containers and waits to be killed: ``docker_child.py PYTHON_IMAGE BARE_IMAGE RUN_DIR``."""

from __future__ import annotations

import asyncio
import sys
from dataclasses import replace
from pathlib import Path

from docker_support import docker_provider
from door_app import DoorApp
from sandbox_providers import SPEC

from turnstile_server.settings import SandboxSettings


async def main(image: str, bare: str, run_dir: str) -> None:
    provider = docker_provider(SandboxSettings(), Path(run_dir), image)
    await provider.start(DoorApp())
    for spec in (SPEC, SPEC, replace(SPEC, image=bare)):
        await provider.create(spec)
    print("ready", flush=True)  # noqa: T201
    await asyncio.Event().wait()


asyncio.run(main(*sys.argv[1:]))
