"""One started provider for each module that judges; a Docker engine's only where one was asked for."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from grading_support import NO_AGENTS, SANDBOXES, Watched

from turnstile_server.sandboxes.background import BackgroundTasks
from turnstile_server.sandboxes.docker.provider import DockerProvider
from turnstile_server.sandboxes.local.provider import LocalProvider
from turnstile_server.sandboxes.protocol import SandboxProvider


def _make(kind: str, run_dir: Path) -> SandboxProvider:
    if kind == "local":
        return LocalProvider(SANDBOXES, run_dir)
    settings = SANDBOXES.model_copy(update={"docker_image": os.environ["TURNSTILE_TEST_IMAGE"]})
    return DockerProvider(settings, run_dir, run_dir.name)


@pytest.fixture(scope="module", params=["local", pytest.param("docker", marks=pytest.mark.docker)])
async def provider(request: pytest.FixtureRequest, anyio_backend: str) -> AsyncIterator[Watched]:
    run_dir = Path(tempfile.mkdtemp(prefix="tg-"))
    made = Watched(_make(request.param, run_dir))
    try:
        async with BackgroundTasks() as tasks:
            try:
                await made.start(NO_AGENTS, tasks)
                yield made
            finally:
                await made.close()
    finally:
        shutil.rmtree(run_dir, ignore_errors=True)
    assert made.left == 0
