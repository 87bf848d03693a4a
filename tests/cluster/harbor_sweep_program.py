"""The start of a server with sandboxes of Harbor's, as far as the removal of what an earlier one left:
`harbor_sweep_program.py RUN_DIR SANDBOXES`."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

from turnstile_server.errors import SandboxUnavailable, StartupError
from turnstile_server.sandboxes.background import BackgroundTasks
from turnstile_server.sandboxes.harbor.backend import HarborBackend
from turnstile_server.sandboxes.helper_sandbox import HelperSandbox
from turnstile_server.sandboxes.protocol import ProviderSetup, SandboxSpec
from turnstile_server.settings import SandboxSettings


async def refuse(spec: SandboxSpec) -> HelperSandbox:
    raise SandboxUnavailable("that is enough")


async def sweep() -> None:
    settings = SandboxSettings.model_validate(json.loads(sys.argv[2]))
    backend = HarborBackend(ProviderSetup(settings, Path(sys.argv[1]), "owner"))
    async with BackgroundTasks() as tasks:
        try:
            await backend.start(tasks, refuse)
        except StartupError as error:
            sys.stdout.write(error.message + "\n")
        finally:
            await backend.close()


asyncio.run(sweep())
