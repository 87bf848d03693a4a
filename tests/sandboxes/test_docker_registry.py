"""`auto` beside a real engine: Docker if it has the default image, else what else works."""

from __future__ import annotations

from pathlib import Path

import pytest
from docker_support import containers_of, python_image
from echo_app import EchoApp, agents_of
from sandbox_providers import SPEC

from turnstile_server.errors import StartupError
from turnstile_server.sandboxes.background import BackgroundTasks
from turnstile_server.sandboxes.protocol import Command, ProviderSetup
from turnstile_server.sandboxes.registry import create_provider
from turnstile_server.settings import SandboxSettings

pytestmark = [pytest.mark.anyio, pytest.mark.docker]


async def test_auto_takes_docker_where_it_has_the_default_image(run_dir: Path, tasks: BackgroundTasks) -> None:
    provider = create_provider(ProviderSetup(SandboxSettings(docker_image=python_image()), run_dir, run_dir.name))
    await provider.start(agents_of(EchoApp()), tasks)
    try:
        assert provider.name == "docker"
        assert provider.isolated
        sandbox = await provider.create(SPEC)
        assert (await sandbox.exec(Command(("echo", "well")))).stdout == b"well\n"
    finally:
        await provider.close()
    assert containers_of(run_dir.name) == []


async def test_two_servers_do_not_share_a_run_folder(run_dir: Path, tasks: BackgroundTasks) -> None:
    settings = SandboxSettings(kind="docker", docker_image=python_image())
    first, second = (create_provider(ProviderSetup(settings, run_dir, f"{run_dir.name}-{n}")) for n in range(2))
    await first.start(agents_of(EchoApp()), tasks)
    try:
        sandbox = await first.create(SPEC)
        with pytest.raises(StartupError, match="another server"):
            await second.start(agents_of(EchoApp()), tasks)
        await second.close()
        assert (await sandbox.exec(Command(("true",)))).exit_code == 0
    finally:
        await first.close()


async def test_auto_takes_what_else_works_where_docker_lacks_the_default_image(
    run_dir: Path, tasks: BackgroundTasks
) -> None:
    settings = SandboxSettings(docker_image="turnstile-test:not-there")
    provider = create_provider(ProviderSetup(settings, run_dir, run_dir.name))
    await provider.start(agents_of(EchoApp()), tasks)
    try:
        # Without bubblewrap Docker is taken after all: tasks may name images that it has.
        assert provider.name in {"local", "docker"}
    finally:
        await provider.close()
