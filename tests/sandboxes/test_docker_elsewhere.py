"""An engine on another machine, by ssh and by TLS: what works, what is told at start, what a lost link does.

The other machine is this one, by a real sshd; a server that must not share its files with it has a mount name
space of its own.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from docker_support import bare_image, containers_of, docker_provider, python_image
from echo_app import EchoApp, agents_of
from sandbox_providers import SPEC
from ssh_server import SshServer, clients, plain_user, ssh_server

from engine_forwarder import engine_over_tcp
from tls_support import certificates, server_context
from turnstile_server.errors import Fault, SandboxFailed, SandboxUnavailable, StartupError
from turnstile_server.sandboxes.background import BackgroundTasks
from turnstile_server.sandboxes.docker.provider import DockerProvider
from turnstile_server.sandboxes.protocol import Command
from turnstile_server.settings import SandboxSettings
from waiting import wait_until

pytestmark = [pytest.mark.anyio, pytest.mark.cluster]

TURNSTILE = Path(sys.executable).with_name("turnstile")
CHILD = Path(__file__).with_name("docker_child.py")
APART = ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs none "$0" && exec "$@"']
"""With a folder that only this process and its children have, as on another machine."""


@pytest.fixture
async def far(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[SshServer]:
    """The machine of the engine."""
    with ssh_server(os.environ["DOCKER_HOST"].removeprefix("unix://")) as server:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        yield server
        await wait_until(lambda: clients(server) == [])


@asynccontextmanager
async def started(run_dir: Path, **changes: Any) -> AsyncIterator[DockerProvider]:
    provider = docker_provider(SandboxSettings.model_validate(changes), run_dir)
    async with BackgroundTasks() as tasks:
        try:
            await provider.start(agents_of(EchoApp()), tasks)
            yield provider
        finally:
            await provider.close()


def left_in(run_dir: Path) -> list[Path]:
    return list(run_dir.iterdir())


async def refusal(run_dir: Path, address: str) -> str:
    """What a start says. It leaves no folder."""
    with pytest.raises(StartupError) as refused:
        async with started(run_dir, docker_host=address, docker_timeout_s=20):
            pass
    assert left_in(run_dir) == []
    return refused.value.message


def validate(run_dir: Path, **environment: str) -> str:
    """What `turnstile tasks validate` says of a task that ships, on a machine that shares no files."""
    run_dir.mkdir(exist_ok=True)
    command = [*APART, str(run_dir), str(TURNSTILE), "tasks", "validate", "--only", "fix-calculator"]
    settings = {
        "TURNSTILE_SANDBOXES__KIND": "docker",
        "TURNSTILE_SANDBOXES__DOCKER_IMAGE": python_image(),
        "TURNSTILE_SANDBOXES__RUN_DIR": f"{run_dir}/of",
    }
    done = subprocess.run(
        command, env={**os.environ, **settings, **environment}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


async def test_a_task_that_ships_validates_over_ssh(far: SshServer, run_dir: Path) -> None:
    assert "1 of 1 tasks are sound" in validate(run_dir, DOCKER_HOST=far.url)


async def test_a_task_that_ships_validates_over_tls(run_dir: Path, tmp_path: Path) -> None:
    folder = certificates(tmp_path)
    with engine_over_tcp(os.environ["DOCKER_HOST"], server_context(folder)) as forwarder:
        secured = {"DOCKER_HOST": forwarder.url, "DOCKER_TLS_VERIFY": "1", "DOCKER_CERT_PATH": str(folder)}
        assert "1 of 1 tasks are sound" in validate(run_dir, **secured)


async def test_what_the_link_over_ssh_lacks_is_told_at_start(far: SshServer, run_dir: Path) -> None:
    assert "no engine's socket at /var/run/nothing.sock" in await refusal(
        run_dir, far.url_of("root", "/var/run/nothing.sock")
    )
    assert "/etc/passwd of ssh://root@127.0.0.1" in await refusal(run_dir, far.url_of("root", "/etc/passwd"))
    with plain_user() as user:
        said = await refusal(run_dir, far.url_of(user, far.engine))
        assert f"{user} may not use the engine's socket {far.engine}" in said
        assert f"usermod -aG docker {user}" in said
    far.know(None)
    assert "log in once by hand" in await refusal(run_dir, far.url)
    far.know("other")
    assert "somebody may be between" in await refusal(run_dir, far.url)
    far.know("host")
    far.use("other")
    said = await refusal(run_dir, far.url)
    assert "accepts no key" in said
    assert "ssh-copy-id" in said
    far.use("user")
    far.cut()
    assert "Connection refused" in await refusal(run_dir, far.url)
    far.more = "AllowStreamLocalForwarding no"
    far.start()
    assert "must forward sockets (AllowStreamLocalForwarding): channel" in await refusal(run_dir, far.url)


async def test_a_machine_without_ssh_says_what_to_install(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(run_dir))
    assert "needs OpenSSH's client" in await refusal(run_dir, "ssh://machine")


async def test_a_link_that_is_lost_fails_what_runs_as_infrastructure_and_is_made_again(
    far: SshServer, run_dir: Path
) -> None:
    async with started(run_dir, docker_host=far.url, docker_transport="stream", docker_timeout_s=20) as provider:
        assert f"at {far.url}" in provider.description
        sandbox = await provider.create(SPEC)
        data = os.urandom(3 << 20)
        piped = await sandbox.exec(Command(("cat",), stdin=data, max_output_bytes=4 << 20, timeout_s=60))
        assert piped.stdout == data
        process = await sandbox.start(Command(("sleep", "1000")))
        far.cut()
        with pytest.raises(SandboxFailed) as failed:
            await process.wait()
        assert failed.value.fault is Fault.INFRASTRUCTURE
        with pytest.raises(SandboxUnavailable) as refused:
            await provider.create(SPEC)
        assert refused.value.fault is Fault.INFRASTRUCTURE
        await sandbox.destroy()
        far.start()
        after = await provider.create(SPEC)
        assert (await after.exec(Command(("echo", "well"), timeout_s=60))).stdout == b"well\n"
        await wait_until(lambda: containers_of(run_dir.name) == [f"turnstile-{after.sandbox_id}"])
        assert len(clients(far)) == 1
    assert containers_of(run_dir.name) == []
    assert left_in(run_dir) == []


async def test_a_server_that_is_killed_leaves_no_ssh_and_auto_takes_the_stream(
    far: SshServer, run_dir: Path
) -> None:
    command = [*APART, str(run_dir), sys.executable, str(CHILD), python_image(), bare_image(), str(run_dir)]
    child = subprocess.Popen(  # noqa: ASYNC220 - it is killed, not awaited
        command, stdout=subprocess.PIPE, env={**os.environ, "DOCKER_HOST": far.url}
    )
    try:
        assert child.stdout is not None
        assert await asyncio.to_thread(child.stdout.readline) == b"ready\n"
        said = await asyncio.to_thread(child.stdout.readline)
        assert b"transport stream (the engine does not see this server's" in said
        assert len(clients(far)) == 1
    finally:
        os.kill(child.pid, signal.SIGKILL)
        child.wait()
        child.stdout.close()
    await wait_until(lambda: clients(far) == [])
    async with started(run_dir):
        assert containers_of(run_dir.name) == []
