"""A started provider per test, on every backend; a run folder with a path short enough for Unix sockets."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from docker_support import OWNERS, remove_volumes
from echo_app import EchoApp, agents_of
from sandbox_providers import BACKENDS, SPEC, Backend

from turnstile_server.sandboxes.background import BackgroundTasks
from turnstile_server.sandboxes.endpoint import AgentEndpoint
from turnstile_server.sandboxes.helper_sandbox import HelperSandbox
from turnstile_server.sandboxes.protocol import SandboxProvider
from turnstile_server.settings import SandboxSettings

USERS = (
    "test_machine_doctor",
    "test_sandbox_attacks",
    "test_sandbox_isolation",
    "test_sandbox_users",
    "test_users_apart",
)
"""Modules about users, which differ where there is a single uid."""
CONTRACT, FILES = "test_sandbox_contract", "test_sandbox_files"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark `thorough` what repeats a verdict on another backend.

    Every run plays all tests in bubblewrap, and in Docker; those of files there only in the first case of each,
    since the helper that reads and writes them is the same program. Of the stream, which carries the same frames
    over another connection, it plays the first case of each test of the contract, as of pods in a fake cluster; of
    bubblewrap with one uid, what is about users.
    """
    seen: set[tuple[str, str]] = set()
    for item in items:
        if not isinstance(item, pytest.Function) or not hasattr(item, "callspec"):
            continue
        used = item.callspec.params.get("backend")
        if not isinstance(used, Backend):
            continue
        module, first = item.path.stem, (key := (item.originalname, used.name)) not in seen
        seen.add(key)
        played = {
            "local": True,
            "local-one-uid": module in USERS,
            "docker": first or module != FILES,
            "docker-stream": first and module == CONTRACT,
            "kubernetes": first and module == CONTRACT and "slow" not in item.keywords,
        }
        if not played.get(used.name, True):
            item.add_marker(pytest.mark.thorough)


@pytest.fixture
def run_dir() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="ts-"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session", autouse=True)
def no_volumes_left() -> Iterator[None]:
    yield
    if OWNERS:
        remove_volumes()


@pytest.fixture
def echo_app() -> EchoApp:
    return EchoApp()


@pytest.fixture
def agents(echo_app: EchoApp) -> AgentEndpoint:
    return agents_of(echo_app)


@pytest.fixture
async def tasks() -> AsyncIterator[BackgroundTasks]:
    async with BackgroundTasks() as background:
        yield background


@pytest.fixture
def sandbox_settings() -> SandboxSettings:
    return SandboxSettings(kind="local", max_file_bytes=4 << 20, max_archive_bytes=8 << 20)


@pytest.fixture(params=BACKENDS, ids=lambda backend: backend.name)
def backend(request: pytest.FixtureRequest) -> Backend:
    chosen: Backend = request.param
    return chosen


@pytest.fixture
async def provider(
    backend: Backend,
    sandbox_settings: SandboxSettings,
    run_dir: Path,
    agents: AgentEndpoint,
    tasks: BackgroundTasks,
) -> AsyncIterator[SandboxProvider]:
    made = backend.make(sandbox_settings, run_dir)
    try:
        await made.start(agents, tasks)
        yield made
    finally:
        await made.close()


@pytest.fixture
async def sandbox(provider: SandboxProvider) -> HelperSandbox:
    made = await provider.create(SPEC)
    assert isinstance(made, HelperSandbox)
    return made
