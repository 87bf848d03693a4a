"""`auto` beside a real engine: Docker if it has the default image, else what else works."""

from __future__ import annotations

from pathlib import Path

import pytest
from docker_support import containers_of, python_image
from door_app import DoorApp
from sandbox_providers import SPEC

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


async def test_auto_takes_what_else_works_where_docker_lacks_the_default_image(run_dir: Path) -> None:
    provider = create_provider(SandboxSettings(docker_image="turnstile-test:not-there"), run_dir, run_dir.name)
    await provider.start(DoorApp())
    try:
        # Without bubblewrap Docker is taken after all: tasks may name images that it has.
        assert provider.name in {"local", "docker"}
    finally:
        await provider.close()
