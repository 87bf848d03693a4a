"""One started provider for each module that judges; a Docker engine's only where one was asked for."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest
from boundary_support import StartedWork
from grading_support import NO_AGENTS, SANDBOXES, Watched
from reward_attacks.attack import RewardAttack

from turnstile_server.grading.inside.boundary.work_process import WorkProcess
from turnstile_server.sandboxes.background import BackgroundTasks
from turnstile_server.sandboxes.docker.provider import DockerProvider
from turnstile_server.sandboxes.local.provider import LocalProvider
from turnstile_server.sandboxes.protocol import SandboxProvider


def _make(kind: str, run_dir: Path) -> SandboxProvider:
    if kind.startswith("local"):
        return LocalProvider(SANDBOXES, run_dir, as_root=kind == "local" and os.geteuid() == 0)
    settings = SANDBOXES.model_copy(update={"docker_image": os.environ["TURNSTILE_TEST_IMAGE"]})
    return DockerProvider(settings, run_dir, run_dir.name)


CHEATS = (
    "test_boundary_cheats.py",
    "test_cheats.py",
    "test_further_cheats.py",
    "test_in_process.py",
    "test_judges_programs.py",
    "test_reward_attacks.py",
    "test_shipped_cheats.py",
    "test_text_cheats.py",
)
FOLDER = Path(__file__).parent
LOCAL_KINDS = ("local-one-uid", "local")
IN_DOCKER = ("test_any_image_grading.py", "test_r2e.py", "test_script_grader.py")
"""Modules whose tests every run plays in Docker, too."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark `thorough` what repeats a verdict in another kind of sandbox.

    Whether a cheat succeeds hardly depends on the kind, so each is played in one, which follows from its name; the
    other tests of grading in bubblewrap with a uid for each user, some in Docker besides.
    """
    for item in items:
        if not item.path.is_relative_to(FOLDER):
            continue
        test, _, parameters = item.name.partition("[")
        kind = next((kind for kind in (*LOCAL_KINDS, "docker") if parameters.startswith(kind)), None)
        if kind is None:
            continue
        if item.path.name in CHEATS:
            kinds = LOCAL_KINDS
            attack = item.callspec.params.get("attack") if isinstance(item, pytest.Function) else None
            if isinstance(attack, RewardAttack) and attack.needs_git:
                kinds = LOCAL_KINDS[:1]  # git asks whose a folder is, so a single uid is the harder case
            cheat = test + parameters.removeprefix(kind)
            once = kinds[crc32(cheat.encode()) % len(kinds)] == kind
        else:
            once = kind == "local" or (kind == "docker" and item.path.name in IN_DOCKER)
        if not once:
            item.add_marker(pytest.mark.thorough)


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


@pytest.fixture
def work() -> Iterator[WorkProcess]:
    made = WorkProcess(StartedWork, [str(FOLDER)])
    yield made
    made.end()


@pytest.fixture
def lib(work: WorkProcess) -> Any:
    """``boundary_lib``, of a process of its own."""
    peer, told = work.import_module("boundary_lib")
    return peer.imports.module(told["module"], "boundary_lib", None)
