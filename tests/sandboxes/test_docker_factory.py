"""`auto` beside a real engine: Docker if it has the default image, else what else works."""

from __future__ import annotations

from pathlib import Path

import pytest
from docker_support import containers_of, python_image
from door_app import DoorApp
from sandbox_providers import SPEC

from turnstile_server.errors import StartupError
from turnstile_server.sandboxes.factory import create_provider
from turnstile_server.sandboxes.protocol import Command
from turnstile_server.settings import SandboxSettings

pytestmark = [pytest.mark.anyio, pytest.mark.docker]


async def test_auto_takes_docker_where_it_has_the_default_image(run_dir: Path) -> None:
    provider = create_provider(SandboxSettings(docker_image=python_image()), run_dir, run_dir.name)
    await provider.start(DoorApp())
    try:
        assert provider.name == "docker"
        assert provider.isolated
        sandbox = await provider.create(SPEC)
        assert (await sandbox.exec(Command(("echo", "well")))).stdout == b"well\n"
    finally:
        await provider.close()
    assert containers_of(run_dir.name) == []


async def test_two_servers_do_not_share_a_run_folder(run_dir: Path) -> None:
    settings = SandboxSettings(kind="docker", docker_image=python_image())
    first, second = (create_provider(settings, run_dir, f"{run_dir.name}-{n}") for n in range(2))
    await first.start(DoorApp())
    try:
        sandbox = await first.create(SPEC)
        with pytest.raises(StartupError, match="another server"):
            await second.start(DoorApp())
        await second.close()
        assert (await sandbox.exec(Command(("true",)))).exit_code == 0
    finally:
        await first.close()


async def test_auto_takes_what_else_works_where_docker_lacks_the_default_image(run_dir: Path) -> None:
    provider = create_provider(SandboxSettings(docker_image="turnstile-test:not-there"), run_dir, run_dir.name)
    await provider.start(DoorApp())
    try:
        # Without bubblewrap Docker is taken after all: tasks may name images that it has.
        assert provider.name in {"local", "docker"}
    finally:
        await provider.close()
