"""The seam between HTTP and the sandbox backends, and a backend by stream over it."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from pathlib import Path

import anyio
import pytest
from echo_app import EchoApp, agents_of
from pool_support import LIMITS

from turnstile_server.errors import SandboxDeath, StartupError
from turnstile_server.sandboxes.background import BackgroundTasks
from turnstile_server.sandboxes.protocol import Command, ProviderSetup, Sandbox, SandboxProvider, SandboxSpec
from turnstile_server.sandboxes.registry import create_provider
from turnstile_server.settings import SandboxSettings

pytestmark = pytest.mark.anyio

GET = (
    "import sys, urllib.request, urllib.error\n"
    "for url in sys.argv[1:]:\n"
    "    try: print(urllib.request.urlopen(url, timeout=20).read().decode())\n"
    "    except urllib.error.HTTPError as error: print(error.code)\n"
)


@pytest.fixture
async def tunnelled(run_dir: Path, echo_app: EchoApp, tasks: BackgroundTasks) -> AsyncIterator[SandboxProvider]:
    settings = SandboxSettings(kind="tunnel_provider:create")
    provider = create_provider(ProviderSetup(settings, run_dir, "owner"))
    await provider.start(agents_of(echo_app), tasks)
    yield provider
    await provider.close()


async def get(sandbox: Sandbox, *paths: str) -> list[str]:
    urls = [f"{sandbox.agent_url}{path}" for path in paths]
    result = await sandbox.exec(Command((sys.executable, "-c", GET, *urls)))
    assert result.exit_code == 0, result.stderr
    return result.stdout.decode().splitlines()


async def test_a_backend_without_mounts_is_one_class_of_any_module(tunnelled: SandboxProvider) -> None:
    assert tunnelled.name == "tunnel"
    one, two = [await tunnelled.create(SandboxSpec(LIMITS)) for _ in range(2)]
    assert await get(one, "/e/one/v1/models") == ["404"], "no episode is admitted yet"
    one.admit("one")
    two.admit("two")
    assert await get(one, "/e/one/v1/models", "/e/one/mcp") == ["GET /e/one/v1/models 0", "GET /e/one/mcp 0"]
    assert await get(one, "/e/two/v1/models", "/", "/e/one", "/e/onetwo/mcp") == ["404"] * 4
    assert await get(two, "/e/two/mcp", "/e/one/mcp") == ["GET /e/two/mcp 0", "404"]
    one.admit(None)
    assert await get(one, "/e/one/v1/models") == ["404"]


async def test_destroying_a_sandbox_ends_its_process_and_the_way_to_the_app(tunnelled: SandboxProvider) -> None:
    sandbox = await tunnelled.create(SandboxSpec(LIMITS))
    port = int((sandbox.agent_url or "").rpartition(":")[2])
    await anyio.connect_tcp("127.0.0.1", port)
    await sandbox.destroy()
    assert await sandbox.died() is SandboxDeath.OUTSIDE
    with pytest.raises(OSError, match="connection attempts failed"):
        await anyio.connect_tcp("127.0.0.1", port)


async def test_an_unknown_kind_names_those_that_there_are(run_dir: Path) -> None:
    with pytest.raises(
        StartupError, match=r"sandboxes\.kind: .*'nonsense'.*auto, docker, harbor, kubernetes, local, none"
    ):
        create_provider(ProviderSetup(SandboxSettings(kind="nonsense"), run_dir, "owner"))
