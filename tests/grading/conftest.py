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
from reward_attacks.attack import RewardAttack

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
    "test_further_cheats.py",
    "test_in_process.py",
    "test_judges_programs.py",
    "test_shipped_cheats.py",
    "test_text_cheats.py",
)
REWARD_ATTACKS = "test_reward_attacks.py"
SANDBOX_KINDS = ("local-one-uid", "local", "docker")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Whether a cheat succeeds hardly depends on the kind of sandbox. So every run plays each of the slow ones in
    one kind, which follows from its name, and ``make cheats`` plays all in every kind. Attacks on the reward need
    an agent's sandbox too, which is dear in Docker: there only the quick ones are played by every run."""
    for item in items:
        test, _, parameters = item.name.partition("[")
        kind = next((kind for kind in SANDBOX_KINDS if parameters.startswith(kind)), None)
        if item.path.name not in (*CHEATS, REWARD_ATTACKS) or kind is None:
            continue
        cheat = test + parameters.removeprefix(kind)
        slow = item.get_closest_marker("slow") is not None
        kinds = SANDBOX_KINDS
        if item.path.name == REWARD_ATTACKS:
            assert isinstance(item, pytest.Function)
            attack = item.callspec.params.get("attack")
            # git asks whose a folder is, so a single uid is the harder case.
            kinds = (
                SANDBOX_KINDS[:1] if isinstance(attack, RewardAttack) and attack.needs_git else SANDBOX_KINDS[:2]
            )
        elif kind == "docker":
            slow = True
        if slow and kinds[crc32(cheat.encode()) % len(kinds)] != kind:
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
