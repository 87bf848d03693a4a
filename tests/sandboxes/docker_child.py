"""Makes containers and waits to be killed: ``docker_child.py PYTHON_IMAGE BARE_IMAGE RUN_DIR [TRANSPORT]``."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import anyio
from docker_support import docker_provider
from echo_app import EchoApp, agents_of
from sandbox_providers import SPEC

from turnstile_server.sandboxes.background import BackgroundTasks
from turnstile_server.settings import SandboxSettings


async def main(image: str, bare: str, run_dir: str, transport: str = "auto") -> None:
    settings = SandboxSettings.model_validate({"docker_transport": transport})
    provider = docker_provider(settings, Path(run_dir), image)
    async with BackgroundTasks() as tasks:
        await provider.start(agents_of(EchoApp()), tasks)
        for spec in (SPEC, SPEC, replace(SPEC, image=bare)):
            await provider.create(spec)
        print("ready", provider.description, sep="\n", flush=True)  # noqa: T201
        await anyio.sleep_forever()


anyio.run(main, *sys.argv[1:])
