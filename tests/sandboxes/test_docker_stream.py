"""Sandboxes whose engine sees none of the server's files: those as volumes, all else over its connection."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import pytest
from docker_support import (
    bare_image,
    container_of,
    containers_of,
    docker_provider,
    engine,
    python_image,
    volumes_of,
)
from echo_app import EchoApp, agents_of
from sandbox_providers import SPEC

from bounded import bounded
from engine_forwarder import engine_over_tcp
from tls_support import certificates, server_context
from turnstile_server.backends import started_sandboxes
from turnstile_server.errors import Fault, SandboxFailed, SandboxUnavailable, StartupError
from turnstile_server.sandboxes.background import BackgroundTasks
from turnstile_server.sandboxes.docker.containers import OWNER_LABEL, bind_mount
from turnstile_server.sandboxes.docker.provider import DockerProvider
from turnstile_server.sandboxes.folder_tar import STAMP
from turnstile_server.sandboxes.protocol import Command, Mount, Sandbox
from turnstile_server.settings import SandboxSettings, Settings
from waiting import wait_until

pytestmark = [pytest.mark.anyio, pytest.mark.docker]

CHILD = Path(__file__).with_name("docker_child.py")
STREAM = {"docker_transport": "stream"}

GET = """
import sys, urllib.request
print(urllib.request.urlopen(sys.argv[1] + "/e/one/mcp").read().decode())
"""


@asynccontextmanager
async def started(run_dir: Path, **changes: Any) -> AsyncIterator[DockerProvider]:
    provider = docker_provider(bounded(SandboxSettings, **changes), run_dir)
    async with BackgroundTasks() as tasks:
        try:
            await provider.start(agents_of(EchoApp()), tasks)
            yield provider
        finally:
            await provider.close()


async def sh(sandbox: Sandbox, script: str) -> str:
    done = await sandbox.exec(Command(("sh", "-c", script), timeout_s=60))
    assert done.exit_code == 0, done
    return done.stdout.decode()


def left_in(run_dir: Path) -> list[Path]:
    return list(run_dir.glob("sb-*"))


async def reaches_the_agent_app(sandbox: Sandbox) -> bool:
    assert sandbox.agent_url is not None
    sandbox.admit("one")
    done = await sandbox.exec(Command(("python3", "-c", GET, sandbox.agent_url), timeout_s=60))
    return done.stdout.strip() == b"GET /e/one/mcp 0"


@pytest.fixture
def agent(tmp_path: Path) -> Path:
    """A folder like an agent's: a program that only its owner may run, links, names of all kinds."""
    folder = tmp_path / "agent"
    (folder / "bin").mkdir(parents=True)
    (folder / "empty").mkdir(mode=0o700)
    (folder / "bin" / "run").write_text("#!/bin/sh\necho ran\n")
    (folder / "bin" / "run").chmod(0o700)
    (folder / "bin" / "link").symlink_to("run")
    (folder / "secret").write_text("text")
    (folder / "secret").chmod(0o600)
    (folder / ("long" * 40)).write_bytes(bytes(3 << 20))
    (folder / "Größe ✓").write_text("named")
    return folder


# Files.


async def test_a_folder_gets_in_whole_readable_and_read_only(run_dir: Path, agent: Path) -> None:
    async with started(run_dir, **STREAM) as provider:
        sandbox = await provider.create(replace(SPEC, mounts=(Mount(agent, "/opt/agent"),)))
        assert await sh(sandbox, "/opt/agent/bin/link") == "ran\n"
        assert await sh(sandbox, "cat /opt/agent/secret '/opt/agent/Größe ✓'") == "textnamed"
        assert await sh(sandbox, "readlink /opt/agent/bin/link; stat -c %u:%a /opt/agent/secret") == "run\n0:644\n"
        assert await sh(sandbox, "cat /opt/agent/longlong* | wc -c; ls /opt/agent/empty") == f"{3 << 20}\n"
        touched = await sandbox.exec(Command(("touch", "/opt/agent/new")))
        assert touched.exit_code != 0
        mounts = container_of(sandbox.sandbox_id).attrs["Mounts"]
        assert {mount["Type"] for mount in mounts} == {"volume"}
        assert not any(mount["RW"] for mount in mounts)


async def test_sandboxes_share_volumes_and_the_next_start_finds_them(run_dir: Path, agent: Path) -> None:
    spec = replace(SPEC, mounts=(Mount(agent, "/opt/agent"),))
    made: list[set[str]] = []
    for _ in range(2):
        async with started(run_dir, **STREAM) as provider:
            pair = await asyncio.gather(provider.create(spec), provider.create(spec))
            for sandbox in pair:
                assert await sh(sandbox, "/opt/agent/bin/run") == "ran\n"
            made.append(_identities(run_dir.name))
    assert len(made[0]) == 2
    assert made[0] == made[1]


async def test_a_command_leaves_no_copy_of_a_folder_on_the_engine(run_dir: Path, agent: Path) -> None:
    """Its owner never comes back to find them."""
    settings = Settings.model_validate(
        {"sandboxes": {"kind": "docker", "docker_image": python_image(), "run_dir": run_dir, **STREAM}}
    )
    async with started_sandboxes(settings) as provider:
        sandbox = await provider.create(replace(SPEC, mounts=(Mount(agent, "/opt/agent"),)))
        assert await sh(sandbox, "/opt/agent/bin/run") == "ran\n"
        owner = container_of(sandbox.sandbox_id).attrs["Config"]["Labels"][OWNER_LABEL]
        assert volumes_of(owner)
        await sandbox.destroy()
    assert not volumes_of(owner)


def _identities(owner: str) -> set[str]:
    volumes = engine().volumes.list(filters={"label": f"{OWNER_LABEL}={owner}"})
    return {f"{each.name} {each.attrs['Labels']['turnstile.fill']}" for each in volumes}


async def test_a_volume_that_was_not_filled_to_its_end_is_made_again(run_dir: Path, agent: Path) -> None:
    spec = replace(SPEC, mounts=(Mount(agent, "/opt/agent"),))
    async with started(run_dir, **STREAM) as provider:
        await provider.create(spec)
    before = _identities(run_dir.name)
    for name in volumes_of(run_dir.name):
        _spoil(name)
    async with started(run_dir, **STREAM) as provider:
        assert await sh(await provider.create(spec), "/opt/agent/bin/run") == "ran\n"
    assert not before & _identities(run_dir.name)


def _spoil(volume: str) -> None:
    """As a fill that was cut off leaves it."""
    script = f"rm -rf /v/bin /v/{STAMP}"
    engine().containers.run(
        python_image(), ["sh", "-c", script], volumes={volume: {"bind": "/v", "mode": "rw"}}, remove=True
    )


async def test_a_volume_that_is_removed_under_the_server_is_filled_again(run_dir: Path, agent: Path) -> None:
    spec = replace(SPEC, mounts=(Mount(agent, "/opt/agent"),))
    async with started(run_dir, **STREAM) as provider:
        await (await provider.create(spec)).destroy()
        for name in volumes_of(run_dir.name):
            engine().volumes.get(name).remove()
        assert await sh(await provider.create(spec), "/opt/agent/bin/run") == "ran\n"


async def test_volumes_of_folders_that_are_gone_or_changed_are_removed(run_dir: Path, agent: Path) -> None:
    spec = replace(SPEC, mounts=(Mount(agent, "/opt/agent"),))
    async with started(run_dir, **STREAM) as provider:
        await provider.create(spec)
    old = set(volumes_of(run_dir.name))
    (agent / "more").write_text("more")
    async with started(run_dir, **STREAM) as provider:
        assert await sh(await provider.create(spec), "cat /opt/agent/more") == "more"
    new = set(volumes_of(run_dir.name))
    assert len(old) == len(new) == 2
    assert len(old & new) == 1  # the helper's
    await anyio.Path(agent).rename(agent.with_name("elsewhere"))
    async with started(run_dir, **STREAM):
        assert set(volumes_of(run_dir.name)) == old & new


async def test_a_folder_that_cannot_be_copied_is_not_the_tasks_fault_and_leaves_nothing(
    run_dir: Path, agent: Path
) -> None:
    os.mkfifo(agent / "pipe")
    async with started(run_dir, **STREAM) as provider:
        with pytest.raises(SandboxUnavailable, match="neither a file, a folder nor a link"):
            await provider.create(replace(SPEC, mounts=(Mount(agent, "/opt/agent"),)))
        assert containers_of(run_dir.name) == []
    assert volumes_of(run_dir.name) == []


async def test_a_copy_that_takes_too_long_is_not_the_tasks_fault_and_leaves_nothing(run_dir: Path) -> None:
    async with started(run_dir, **STREAM, docker_copy_timeout_s=0.001) as provider:
        with pytest.raises(SandboxUnavailable, match=r"more than 0\.001 s to ") as said:
            await provider.create(SPEC)
        assert said.value.fault is Fault.INFRASTRUCTURE
        await wait_until(lambda: containers_of(run_dir.name) == [])
    assert left_in(run_dir) == []


async def test_a_creation_cancelled_while_it_fills_leaves_no_container(run_dir: Path, agent: Path) -> None:
    spec = replace(SPEC, mounts=(Mount(agent, "/opt/agent"),))
    async with started(run_dir, **STREAM) as provider:
        for step in range(8):
            creating = asyncio.create_task(provider.create(spec))
            await asyncio.sleep(0.04 * step)  # so that it is cancelled at different moments
            creating.cancel()
            await asyncio.gather(creating, return_exceptions=True)
            if not creating.cancelled() and creating.exception() is None:
                await creating.result().destroy()
        assert await sh(await provider.create(spec), "/opt/agent/bin/run") == "ran\n"
    assert containers_of(run_dir.name) == []
    assert left_in(run_dir) == []


async def test_images_without_python_get_their_files_too(run_dir: Path, agent: Path) -> None:
    async with started(run_dir, **STREAM) as provider:
        sandbox = await provider.create(replace(SPEC, image=bare_image(), mounts=(Mount(agent, "/opt/agent"),)))
        assert await sh(sandbox, "/opt/agent/bin/run") == "ran\n"
        await sandbox.write("/workspace/x", b"y")
        assert await sandbox.read("/workspace/x", 10) == b"y"


# Which transport.


async def test_auto_binds_what_the_engine_sees(run_dir: Path, agent: Path) -> None:
    async with started(run_dir) as provider:
        assert "transport bind (the engine sees this server's files)" in provider.description
        sandbox = await provider.create(replace(SPEC, mounts=(Mount(agent, "/opt/agent"),)))
        mounts = container_of(sandbox.sandbox_id).attrs["Mounts"]
        assert {mount["Type"] for mount in mounts} == {"bind"}
    assert volumes_of(run_dir.name) == []


async def test_bind_on_an_engine_that_sees_nothing_stops_the_start_and_auto_streams(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("turnstile_server.sandboxes.docker.server_files._microseconds", lambda folder: 1)
    with pytest.raises(StartupError, match="docker_transport = bind cannot work"):
        async with started(run_dir, docker_transport="bind"):
            raise AssertionError("it started")
    async with started(run_dir) as provider:
        assert "transport stream (the engine does not see this server's" in provider.description
        assert await reaches_the_agent_app(await provider.create(SPEC))


async def test_a_folder_that_the_engine_does_not_see_is_the_infrastructures_fault_where_it_must_be_bound(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with started(run_dir, docker_transport="bind") as provider:
        hidden = Mount(Path("/proc/self/task"), "/opt/agent")  # there for this process
        bodies = "turnstile_server.sandboxes.docker.containers.bind_mount"
        real = bind_mount
        monkeypatch.setattr(bodies, lambda source, target: real(f"{source}/of-another-machine", target))
        with pytest.raises(SandboxUnavailable, match="does not see this server's files") as refused:
            await provider.create(replace(SPEC, mounts=(hidden,)))
        assert refused.value.fault is Fault.INFRASTRUCTURE


async def test_a_default_image_that_is_missing_is_said_at_start_and_tasks_with_images_work(
    run_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    missing = "turnstile-test:not-there"
    provider = docker_provider(SandboxSettings(), run_dir, missing)
    async with BackgroundTasks() as tasks:
        try:
            await provider.start(agents_of(EchoApp()), tasks)
            assert f"tasks that name no image will be refused: Docker has no image {missing}" in caplog.text
            with pytest.raises(SandboxUnavailable, match=f"{missing}.*docker pull") as refused:
                await provider.create(SPEC)
            assert refused.value.fault is Fault.INFRASTRUCTURE
            sandbox = await provider.create(replace(SPEC, image=python_image()))
            assert await sh(sandbox, "echo well") == "well\n"
        finally:
            await provider.close()


# Ends.


async def test_when_the_server_is_killed_its_containers_end_by_themselves(run_dir: Path) -> None:
    command = [sys.executable, str(CHILD), python_image(), python_image(), str(run_dir), "stream"]
    child = subprocess.Popen(command, stdout=subprocess.PIPE)  # noqa: ASYNC220 - it is killed, not awaited
    try:
        assert child.stdout is not None
        assert await asyncio.to_thread(child.stdout.readline) == b"ready\n"
        names = containers_of(run_dir.name)
        assert len(names) == 3
    finally:
        os.kill(child.pid, signal.SIGKILL)
        child.wait()
        child.stdout.close()
    await wait_until(lambda: not any(engine().containers.get(name).status == "running" for name in names))
    async with started(run_dir, **STREAM):
        assert containers_of(run_dir.name) == []


# Over TCP.


async def test_an_engine_over_tcp_serves_commands_files_and_the_agents_connections(
    run_dir: Path, agent: Path
) -> None:
    with engine_over_tcp(os.environ["DOCKER_HOST"]) as forwarder:
        async with started(run_dir, docker_host=forwarder.url, **STREAM) as provider:
            sandbox = await provider.create(replace(SPEC, mounts=(Mount(agent, "/opt/agent"),)))
            await _works(sandbox)
            bare = await provider.create(replace(SPEC, image=bare_image()))
            assert await sh(bare, "echo well") == "well\n"


async def test_nothing_is_lost_where_a_reply_and_what_follows_come_in_one_piece(run_dir: Path) -> None:
    with engine_over_tcp(os.environ["DOCKER_HOST"]) as forwarder:
        async with started(run_dir, docker_host=forwarder.url, **STREAM) as provider:
            bare = await provider.create(replace(SPEC, image=bare_image()))
            forwarder.delay_s = 0.2
            for _ in range(4):
                assert await sh(bare, "echo well") == "well\n"
            forwarder.delay_s = 0.05
            assert await sh(await provider.create(SPEC), "echo well") == "well\n"


async def test_an_engine_over_tls_does_the_same(
    run_dir: Path, agent: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = certificates(tmp_path)
    with engine_over_tcp(os.environ["DOCKER_HOST"], server_context(folder)) as forwarder:
        monkeypatch.setenv("DOCKER_TLS_VERIFY", "1")
        monkeypatch.setenv("DOCKER_CERT_PATH", str(folder))
        async with started(run_dir, docker_host=forwarder.url, **STREAM) as provider:
            await _works(await provider.create(replace(SPEC, mounts=(Mount(agent, "/opt/agent"),))))
            bare = await provider.create(replace(SPEC, image=bare_image()))
            assert await sh(bare, "echo well") == "well\n"
            # TLS closes no half of a connection: the end of the input is told otherwise.
            data = os.urandom(1 << 20)
            piped = await bare.exec(Command(("cat",), stdin=data, max_output_bytes=2 << 20, timeout_s=60))
            assert (piped.exit_code, piped.stdout) == (0, data)
            unread = await bare.exec(Command(("sh", "-c", "exit 7"), stdin=data, timeout_s=60))
            assert (unread.exit_code, unread.timed_out) == (7, False)
            await bare.write("/workspace/x", data)
            assert await bare.read("/workspace/x", 2 << 20) == data


async def _works(sandbox: Sandbox) -> None:
    data = os.urandom(3 << 20)
    piped = await sandbox.exec(Command(("cat",), stdin=data, max_output_bytes=4 << 20, timeout_s=60))
    assert piped.stdout == data
    await sandbox.write("/workspace/file", data)
    assert await sandbox.read("/workspace/file", 4 << 20) == data
    assert await sh(sandbox, "/opt/agent/bin/run") == "ran\n"
    assert await reaches_the_agent_app(sandbox)


async def test_an_engine_that_dies_fails_what_runs_as_infrastructure_and_serves_again_when_it_is_back(
    run_dir: Path,
) -> None:
    with engine_over_tcp(os.environ["DOCKER_HOST"]) as forwarder:
        async with started(run_dir, docker_host=forwarder.url, docker_timeout_s=20, **STREAM) as provider:
            sandbox = await provider.create(SPEC)
            process = await sandbox.start(Command(("sleep", "1000")))
            forwarder.cut()
            with pytest.raises(SandboxFailed) as failed:
                await process.wait()
            assert failed.value.fault is Fault.INFRASTRUCTURE
            await sandbox.died()
            with pytest.raises(SandboxUnavailable) as refused:
                await provider.create(SPEC)
            assert refused.value.fault is Fault.INFRASTRUCTURE
            await sandbox.destroy()
            forwarder.open()
            after = await provider.create(SPEC)
            assert await sh(after, "echo well") == "well\n"
            # What could not be removed while it was away is removed now.
            await wait_until(lambda: containers_of(run_dir.name) == [f"turnstile-{after.sandbox_id}"])
    assert containers_of(run_dir.name) == []
