"""One started provider for each module that judges; a Docker engine's only where one was asked for."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from zlib import crc32

import pytest
from grading_support import NO_AGENTS, SANDBOXES, Watched

from turnstile_server.sandboxes.background import BackgroundTasks
from turnstile_server.sandboxes.docker.provider import DockerProvider
from turnstile_server.sandboxes.local.provider import LocalProvider
from turnstile_server.sandboxes.protocol import SandboxProvider


def _make(kind: str, run_dir: Path) -> SandboxProvider:
    if kind.startswith("local"):
        return LocalProvider(SANDBOXES, run_dir, as_root=kind == "local" and os.geteuid() == 0)
    settings = SANDBOXES.model_copy(update={"docker_image": os.environ["TURNSTILE_TEST_IMAGE"]})
    return DockerProvider(settings, run_dir, run_dir.name)


ELSEWHERE = 3
"""Outside bubblewrap as root, one in so many of the cheats at the boundary is played by default."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What the boundary lets through hardly depends on the kind of sandbox: in Docker and with one uid a share of
    its cheats, by name, is played in every run, and all by ``make cheats``."""
    for item in items:
        if item.path.name in ("test_boundary_cheats.py", "test_further_cheats.py"):
            kind, _, name = item.name.partition("[")[2].partition("-one-uid-" if "-one-uid-" in item.name else "-")
            if (kind == "docker" or "-one-uid-" in item.name) and crc32(name.encode()) % ELSEWHERE:
                item.add_marker(pytest.mark.cheats)


# As root there is a kind of local sandboxes with a uid for each user, and one with a single uid.
KINDS = ["local", *([pytest.param("local-one-uid", marks=pytest.mark.slow)] if os.geteuid() == 0 else [])]


@pytest.fixture(scope="module", params=[*KINDS, pytest.param("docker", marks=pytest.mark.docker)])
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
