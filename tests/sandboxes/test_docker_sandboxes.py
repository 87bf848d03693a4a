"""What only containers can show: their limits, what the engine knows of them, sweeping, an engine that fails."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import docker
import pytest
from docker.errors import APIError
from docker_support import bare_image, container_of, containers_of, docker_provider, engine, python_image
from echo_app import EchoApp, agents_of
from sandbox_providers import LIMITS, SPEC

from turnstile_server.errors import SandboxFailed, SandboxUnavailable, StartupError, TaskFailed
from turnstile_server.sandboxes import call_filter
from turnstile_server.sandboxes.background import BackgroundTasks
from turnstile_server.sandboxes.docker.containers import OWNER_LABEL, SANDBOX_LABEL
from turnstile_server.sandboxes.docker.engine import DockerEngine
from turnstile_server.sandboxes.docker.provider import DockerProvider
from turnstile_server.sandboxes.endpoint import AgentEndpoint
from turnstile_server.sandboxes.pool import SandboxPool
from turnstile_server.sandboxes.protocol import HOMES, Command, ExecResult, Mount, Sandbox, User
from turnstile_server.settings import SandboxSettings
from waiting import PATIENCE_S, wait_until

pytestmark = [pytest.mark.anyio, pytest.mark.docker]

CHILD = Path(__file__).with_name("docker_child.py")


@asynccontextmanager
async def started(
    settings: SandboxSettings, run_dir: Path, image: str | None = None
) -> AsyncIterator[DockerProvider]:
    provider = docker_provider(settings, run_dir, image)
    async with BackgroundTasks() as tasks:
        try:
            await provider.start(agents_of(EchoApp()), tasks)
            yield provider
        finally:
            await provider.close()


@pytest.fixture
async def docker_sandboxes(sandbox_settings: SandboxSettings, run_dir: Path) -> AsyncIterator[DockerProvider]:
    async with started(sandbox_settings, run_dir) as provider:
        yield provider


def folders(run_dir: Path) -> list[str]:
    """Of sockets, that are left."""
    return [path.name for path in run_dir.glob("sb-*")]


async def sh(sandbox: Sandbox, script: str, *, user: User = User.AGENT) -> ExecResult:
    return await sandbox.exec(Command(("sh", "-c", script), user=user, timeout_s=60))


async def test_a_command_that_takes_more_memory_than_there_is_ends_with_137_and_the_sandbox_lives(
    docker_sandboxes: DockerProvider,
) -> None:
    sandbox = await docker_sandboxes.create(SPEC)
    greedy = await sandbox.exec(Command(("python3", "-c", f"bytearray({2 * LIMITS.memory_bytes})")))
    assert (greedy.exit_code, greedy.timed_out) == (137, False)
    assert (await sh(sandbox, "echo well")).stdout == b"well\n"


async def test_files_in_memory_folders_count_to_the_memory(docker_sandboxes: DockerProvider) -> None:
    small = replace(SPEC, limits=replace(LIMITS, memory_bytes=64 << 20, disk_bytes=512 << 20))
    sandbox = await docker_sandboxes.create(small)
    filled = await sh(sandbox, "exec head -c 100000000 /dev/zero > big")
    assert filled.exit_code == 137


async def test_the_engine_was_told_every_limit(docker_sandboxes: DockerProvider) -> None:
    sandbox = await docker_sandboxes.create(replace(SPEC, limits=replace(LIMITS, cpus=0.5)))
    config = container_of(sandbox.sandbox_id).attrs
    host = config["HostConfig"]
    assert host["NanoCpus"] == 500_000_000
    assert host["PidsLimit"] == LIMITS.pids
    assert host["Memory"] == host["MemorySwap"] == LIMITS.memory_bytes
    assert host["NetworkMode"] == "none"
    assert host["ReadonlyRootfs"] is True
    assert host["Privileged"] is False
    assert host["CapDrop"] == ["ALL"]
    assert {name.removeprefix("CAP_") for name in host["CapAdd"]} == {
        "SETUID",
        "SETGID",
        "SETPCAP",
        "KILL",
    }
    assert host["SecurityOpt"] == ["no-new-privileges", f"seccomp={call_filter.docker_profile()}"]
    assert host["RestartPolicy"]["Name"] == "no"
    assert all(not mount["RW"] for mount in config["Mounts"])


@pytest.mark.parametrize("user", list(User))
async def test_nobody_inside_has_a_capability_or_can_get_one(docker_sandboxes: DockerProvider, user: User) -> None:
    sandbox = await docker_sandboxes.create(SPEC)
    status = (await sh(sandbox, "cat /proc/self/status", user=user)).stdout.decode()
    fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    assert int(fields["CapEff"], 16) == int(fields["CapPrm"], 16) == int(fields["CapAmb"], 16) == 0
    assert fields["NoNewPrivs"] == "1"
    assert fields["Seccomp"] == "2"
    assert (await sh(sandbox, "mount -t tmpfs none /tmp; mknod x b 8 0; chown 0 .", user=user)).exit_code != 0


async def test_only_the_work_folder_the_homes_and_tmp_can_be_written_to(docker_sandboxes: DockerProvider) -> None:
    sandbox = await docker_sandboxes.create(SPEC)
    homes = " ".join(HOMES.values())
    places = f"/workspace /tmp {homes} /dev /dev/shm /run /run/turnstile /turnstile/helper /etc /usr /"
    script = f'for f in {places}; do if touch "$f/t" 2> /dev/null; then echo "$f"; fi; done'
    written = set((await sh(sandbox, script)).stdout.decode().split())
    assert written == {"/workspace", "/tmp", "/home/agent", "/dev/shm"}


@pytest.fixture
def given(tmp_path: Path) -> Path:
    (tmp_path / "given").write_text("text")
    tmp_path.chmod(0o755)
    return tmp_path


async def test_a_mount_can_be_read_and_not_written(docker_sandboxes: DockerProvider, given: Path) -> None:
    sandbox = await docker_sandboxes.create(replace(SPEC, mounts=(Mount(given, "/opt/given"),)))
    assert await sandbox.read("/opt/given/given", 100) == b"text"
    assert (await sh(sandbox, "echo x > /opt/given/given")).exit_code != 0
    assert (await sh(sandbox, "touch /opt/given/new")).exit_code != 0


async def test_files_of_an_image_are_the_agents_to_change(docker_sandboxes: DockerProvider) -> None:
    spec = replace(SPEC, workdir="/usr/share/zoneinfo/Europe", image_files=True)
    sandbox = await docker_sandboxes.create(spec)
    changed = await sh(sandbox, "echo mine > Paris && echo new > sub && cat Paris sub && ls | wc -l")
    assert changed.exit_code == 0, changed
    assert changed.stdout.startswith(b"mine\nnew\n")
    assert (await sh(sandbox, "touch /usr/bin/x || touch /etc/x")).exit_code != 0
    status = (await sh(sandbox, "grep CapEff /proc/self/status")).stdout.split()[-1]
    assert int(status, 16) == 0


async def test_containers_bear_their_owner_and_their_sandbox(
    docker_sandboxes: DockerProvider, run_dir: Path
) -> None:
    sandbox = await docker_sandboxes.create(SPEC)
    labels = container_of(sandbox.sandbox_id).labels
    assert labels[OWNER_LABEL] == run_dir.name
    assert labels[SANDBOX_LABEL] == sandbox.sandbox_id
    await sandbox.destroy()
    assert containers_of(run_dir.name) == []


async def test_what_a_killed_server_left_is_removed_at_the_next_start_and_nobody_elses(
    sandbox_settings: SandboxSettings, run_dir: Path
) -> None:
    other = run_dir / "other"
    async with started(sandbox_settings, other) as neighbour:
        kept = await neighbour.create(SPEC)
        command = [sys.executable, str(CHILD), python_image(), bare_image(), str(run_dir)]
        child = subprocess.Popen(command, stdout=subprocess.PIPE)  # noqa: ASYNC220 - it is killed, not awaited
        try:
            assert child.stdout is not None
            assert await asyncio.to_thread(child.stdout.readline) == b"ready\n"
            assert len(containers_of(run_dir.name)) == 3
        finally:
            os.kill(child.pid, signal.SIGKILL)
            child.wait()
            child.stdout.close()
        async with started(sandbox_settings, run_dir):
            assert containers_of(run_dir.name) == []
            assert folders(run_dir) == []
        assert (await sh(kept, "echo well")).stdout == b"well\n"


async def test_a_container_that_is_removed_under_a_command_fails_it_and_destroy_is_still_fine(
    docker_sandboxes: DockerProvider, run_dir: Path
) -> None:
    sandbox = await docker_sandboxes.create(SPEC)
    process = await sandbox.start(Command(("sleep", "1000")))
    container_of(sandbox.sandbox_id).remove(force=True)
    with pytest.raises(SandboxFailed):
        await process.wait()
    with pytest.raises(SandboxFailed):
        await sandbox.read("/workspace/x", 10)
    await sandbox.destroy()
    assert folders(run_dir) == []


async def test_why_a_container_died_is_said(
    docker_sandboxes: DockerProvider, caplog: pytest.LogCaptureFixture
) -> None:
    sandbox = await docker_sandboxes.create(SPEC)
    container_of(sandbox.sandbox_id).kill()
    await wait_until(lambda: "container ended: exit code 137" in caplog.text)


@pytest.mark.parametrize("image", ["turnstile-test:not-there", "not an image name"])
async def test_a_missing_image_is_the_tasks_fault_and_named(docker_sandboxes: DockerProvider, image: str) -> None:
    with pytest.raises(TaskFailed, match=image):
        await docker_sandboxes.create(replace(SPEC, image=image))


async def test_an_image_that_can_run_nothing_is_the_tasks_fault_and_named(
    docker_sandboxes: DockerProvider, run_dir: Path
) -> None:
    name = "turnstile-test:empty"
    engine().api.import_image_from_data(bytes(10240), repository="turnstile-test", tag="empty")
    try:
        with pytest.raises(TaskFailed, match=name):
            await docker_sandboxes.create(replace(SPEC, image=name))
        assert containers_of(run_dir.name) == []
        assert folders(run_dir) == []
    finally:
        engine().images.remove(name)


async def test_a_memory_limit_that_the_engine_refuses_is_said(docker_sandboxes: DockerProvider) -> None:
    with pytest.raises((TaskFailed, SandboxUnavailable), match=r"(?i)memory"):
        await docker_sandboxes.create(replace(SPEC, limits=replace(LIMITS, memory_bytes=1 << 20)))


async def test_a_creation_cancelled_at_any_moment_leaves_no_container(
    sandbox_settings: SandboxSettings, run_dir: Path
) -> None:
    async with started(sandbox_settings, run_dir) as provider:
        await (await provider.create(SPEC)).destroy()
        for step in range(12):
            creating = asyncio.create_task(provider.create(SPEC))
            await asyncio.sleep(0.03 * step)  # so that it is cancelled at different moments
            creating.cancel()
            await asyncio.gather(creating, return_exceptions=True)
            if not creating.cancelled() and creating.exception() is None:
                await creating.result().destroy()
        await wait_until(lambda: containers_of(run_dir.name) == [])
        assert folders(run_dir) == []


async def test_a_provider_that_closes_while_it_creates_leaves_no_container(
    sandbox_settings: SandboxSettings, run_dir: Path
) -> None:
    """The engine may make a container after the one who asked for it has gone."""
    for step in range(8):
        async with started(sandbox_settings, run_dir) as provider:
            creating = [asyncio.create_task(provider.create(SPEC)) for _ in range(3)]
            await asyncio.sleep(0.04 * step)  # so that they are cancelled at different moments
            for each in creating:
                each.cancel()
        assert containers_of(run_dir.name) == []
        await asyncio.gather(*creating, return_exceptions=True)


async def test_a_removal_returns_when_the_container_is_gone_whoever_removes_it(
    sandbox_settings: SandboxSettings, run_dir: Path
) -> None:
    async with started(sandbox_settings, run_dir) as provider:
        for _ in range(3):
            await provider.create(SPEC)
            (made,) = containers_of(run_dir.name)

            async def remove(container: str) -> list[str]:
                await provider._engine.remove(container)
                return containers_of(run_dir.name)

            assert await asyncio.gather(*[remove(made) for _ in range(6)]) == [[]] * 6


async def test_a_removal_does_not_wait_by_the_engines_wait_which_may_never_return(
    sandbox_settings: SandboxSettings, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Engine 20.10: who asks to be told of a removal just as it ends may never be told."""
    remove, refused = docker.APIClient.remove_container, 0

    def refusing(api: docker.APIClient, *args: Any, **options: Any) -> None:
        nonlocal refused
        if refused < 3:
            refused += 1
            raise APIError("removal is already in progress", response=SimpleNamespace(status_code=409))
        remove(api, *args, **options)

    def never(*_: Any, **__: Any) -> None:
        threading.Event().wait()

    async with started(sandbox_settings, run_dir) as provider:
        await provider.create(SPEC)
        (made,) = containers_of(run_dir.name)
        with monkeypatch.context() as patch:
            patch.setattr(docker.APIClient, "remove_container", refusing)
            patch.setattr(docker.APIClient, "wait", never)
            with anyio.fail_after(PATIENCE_S):
                await provider._engine.remove(made)
        assert refused == 3
        assert containers_of(run_dir.name) == []


async def test_a_removal_that_another_call_never_ends_is_given_up_after_the_time_out(
    sandbox_settings: SandboxSettings, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[float] = []

    def refusing(api: docker.APIClient, *args: Any, **options: Any) -> None:
        asked.append(time.monotonic())
        raise APIError("removal is already in progress", response=SimpleNamespace(status_code=409))

    settings = sandbox_settings.model_copy(update={"docker_timeout_s": 2.0})
    async with started(sandbox_settings, run_dir) as provider:
        await provider.create(SPEC)
        (made,) = containers_of(run_dir.name)
        impatient = DockerEngine(settings)
        await impatient.open()
        with monkeypatch.context() as patch:
            patch.setattr(docker.APIClient, "remove_container", refusing)
            with pytest.raises(SandboxUnavailable, match=r"docker_timeout_s|cannot remove"):
                await impatient.remove(made)
            await wait_until(lambda: time.monotonic() - asked[-1] > 1)  # nobody goes on asking
        assert 1.5 < asked[-1] - asked[0] < 30
        impatient.close()


@pytest.mark.parametrize("refusals", [1, 1000])
async def test_a_removal_that_the_engine_refuses_is_tried_again_and_left_to_the_sweep(
    sandbox_settings: SandboxSettings, run_dir: Path, monkeypatch: pytest.MonkeyPatch, refusals: int
) -> None:
    remove, asked = DockerEngine.remove, 0

    async def refusing(engine: DockerEngine, container: str) -> None:
        nonlocal asked
        asked += 1
        if asked <= refusals:
            raise SandboxUnavailable("device or resource busy")
        await remove(engine, container)

    async with started(sandbox_settings, run_dir) as provider:
        sandbox = await provider.create(SPEC)
        with monkeypatch.context() as patch:
            patch.setattr(DockerEngine, "remove", refusing)
            await sandbox.destroy()
        assert len(containers_of(run_dir.name)) == (0 if refusals == 1 else 1)
        assert folders(run_dir) == []
    assert containers_of(run_dir.name) == []


async def test_a_pool_hands_out_warm_containers_and_replaces_a_dead_one(
    sandbox_settings: SandboxSettings, run_dir: Path, tasks: BackgroundTasks
) -> None:
    settings = sandbox_settings.model_copy(update={"warm": 1, "max_open": 4})
    pool = SandboxPool(docker_provider(settings, run_dir), settings)
    try:
        await pool.start(agents_of(EchoApp()), tasks)
        first = await pool.create(SPEC)
        await wait_until(lambda: pool.warm == 1)
        (warm,) = [name for name in containers_of(run_dir.name) if first.sandbox_id not in name]
        second = await pool.create(SPEC)
        assert second.sandbox_id in warm
        await wait_until(lambda: pool.warm == 1)
        known = (first.sandbox_id, second.sandbox_id)
        (dead,) = [name for name in containers_of(run_dir.name) if not name.endswith(known)]
        engine().containers.get(dead).kill()
        third = await pool.create(SPEC)
        assert third.sandbox_id not in dead
        assert (await sh(third, "echo well")).stdout == b"well\n"
    finally:
        await pool.close()
    assert containers_of(run_dir.name) == []
    assert folders(run_dir) == []


async def test_the_runtime_of_the_settings_runs_every_container(
    sandbox_settings: SandboxSettings, run_dir: Path, agents: AgentEndpoint, tasks: BackgroundTasks
) -> None:
    provider = docker_provider(sandbox_settings.model_copy(update={"docker_runtime": "runc"}), run_dir)
    try:
        await provider.start(agents, tasks)
        sandbox = await provider.create(SPEC)
        assert container_of(sandbox.sandbox_id).attrs["HostConfig"]["Runtime"] == "runc"
        assert ", runtime runc, " in provider.description
        assert "; a uid for each user of each sandbox; " in provider.description
    finally:
        await provider.close()


async def test_a_runtime_that_the_engine_does_not_know_stops_the_start(
    sandbox_settings: SandboxSettings, run_dir: Path, agents: AgentEndpoint, tasks: BackgroundTasks
) -> None:
    provider = docker_provider(sandbox_settings.model_copy(update={"docker_runtime": "nobody"}), run_dir)
    with pytest.raises(StartupError, match=r"no runtime nobody .*runc.*daemon\.json"):
        await provider.start(agents, tasks)
    await provider.close()
