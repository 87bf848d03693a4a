"""The runtime of this machine, in the folder that servers and other suites share: made once, in some seconds."""

from __future__ import annotations

import pytest

from turnstile_server.backends import runtimes_of
from turnstile_server.runtimes.store import CarriedRuntime
from turnstile_server.settings import Settings


@pytest.fixture(scope="session")
async def runtime(anyio_backend: str) -> CarriedRuntime:
    return await runtimes_of(Settings()).get()
